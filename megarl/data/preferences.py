"""Builds batches of compared responses or labelled steps (feedback.py), and keeps a history.

As a policy changes, its reward model learns from rankings of fresh samples and from a share of
earlier rankings:

    scored groups --rankings--> fresh --History.mixed--> fresh + ceil(share x all) of the history
                  --ranking_batch--> batch
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, permutations
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.data.collate import answer_row, token_batch
from megarl.data.feedback import labelled_steps, ranked_responses
from megarl.data.tokenizer import Tokenizer
from megarl.types import Group, PreferenceBatch, Prompt, StepBatch


@dataclass(frozen=True, eq=False)
class Ranking:
    """Responses to one prompt, each with tokens [L] int64, trainable [L] bool and a label."""

    rows: tuple[tuple[Tensor, Tensor], ...]
    labels: tuple[float, ...]  # the highest is best
    margin: float = 0.0  # the same for every pair


def ranking_batch(rankings: Sequence[Ranking]) -> PreferenceBatch:
    """Returns a batch with a row per response and all pairs of responses with unequal labels."""
    pairs = []
    group = []
    margins = []
    for number, ranking in enumerate(rankings):
        labels = ranking.labels
        first = len(group)
        pairs += [
            (first + i, first + j)
            for i, j in permutations(range(len(labels)), 2)
            if labels[i] > labels[j]
        ]
        margins += [ranking.margin] * (len(pairs) - len(margins))
        group += [number] * len(labels)
    tokens = token_batch(list(chain.from_iterable(ranking.rows for ranking in rankings)))
    return PreferenceBatch(
        **vars(tokens),
        group=torch.tensor(group, dtype=torch.int64),
        pairs=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        margins=torch.tensor(margins, dtype=torch.float32),
    )


def rankings(groups: Sequence[Group], pairs: Literal["all", "best_worst"] = "all") -> list[Ranking]:
    """Ranks the samples of each group by reward, or only the first best and the first worst sample.

    A group whose rewards are all equal gives no ranking.
    """
    result = []
    for group in groups:
        samples = group.samples
        labels = torch.tensor([sample.reward or 0.0 for sample in samples]).tolist()  # fp32
        if len(set(labels)) > 1:
            ranked = (
                range(len(labels))
                if pairs == "all"
                else [labels.index(max(labels)), labels.index(min(labels))]
            )
            rows = tuple((samples[i].tokens, samples[i].trainable) for i in ranked)
            result.append(Ranking(rows, tuple(labels[i] for i in ranked)))
    return result


def preference_batch(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, ignore_media: bool = False
) -> PreferenceBatch:
    """Returns a batch with a row per response and all pairs of responses with unequal ranks.

    A response ends with the end token; all its tokens are learned. Prompts whose responses are all
    tied have no rows. Raises ValueError with the problem's number and the remedy.
    """
    rankings = []
    for prompt in prompts:
        where = f"problem {prompt.prompt_id} ({prompt.text[:40]!r})"
        responses, ranks, margin = ranked_responses(
            prompt.extra, prompt.text, where, ignore_media=ignore_media
        )
        if len(set(ranks)) > 1:
            rows = tuple(answer_row(tokenizer, prompt, response) for response in responses)
            rankings.append(Ranking(rows, tuple(-rank for rank in ranks), margin))
    return ranking_batch(rankings)


def step_batch(tokenizer: Tokenizer, prompts: Sequence[Prompt], *, separator: str) -> StepBatch:
    """Returns a batch with one row per prompt and its steps.

    Each step ends with `separator`; the mask is True at its last token. Raises ValueError.
    """
    rows = []
    ends = []
    right = []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        for text, label in labelled_steps(
            prompt.extra, f"problem {prompt.prompt_id} ({prompt.text[:40]!r})"
        ):
            tokens += tokenizer.encode(text + separator)
            ends.append(sum(len(row) for row, _ in rows) + len(tokens) - 1)
            right.append(label)
        rows.append((torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.bool)))
    flat = token_batch(rows)
    end_K = torch.tensor(ends, dtype=torch.int64)
    return StepBatch(
        **vars(replace(flat, mask=flat.mask.index_fill(0, end_K, True))),
        is_right=flat.mask.index_put((end_K,), torch.tensor(right, dtype=torch.bool)),
    )


@dataclass
class History:
    """Rankings of earlier iterations; `state` and `restore` serve checkpoints."""

    share: float  # share of a batch's rankings that come from the history
    capacity: int  # number of rankings to keep
    seed: int
    rankings: list[Ranking] = field(default_factory=list)

    def mixed(self, fresh: Sequence[Ranking], key: str) -> list[Ranking]:
        """Returns n rankings: `fresh` and ceil(share x n) of the history (or all of it, if it has
        fewer), drawn without repeats by a seed that depends on `key`.
        """
        share = Fraction(str(self.share))  # exact: with floats, 0.1 x 70 is more than 7
        count = min(math.ceil(share * len(fresh) / (1 - share)), len(self.rankings))
        return [*fresh, *random.Random(f"{self.seed}/{key}").sample(self.rankings, count)]

    def add(self, fresh: Sequence[Ranking]) -> None:
        self.rankings = [*self.rankings, *fresh][-self.capacity :]

    def state(self) -> dict[str, Any]:
        rows = []
        for ranking in self.rankings:
            rows.append([(x.tolist(), mask.tolist()) for x, mask in ranking.rows])
        return {"rows": rows, "labels": [list(ranking.labels) for ranking in self.rankings]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rankings = []
        for stored, labels in zip(state["rows"], state["labels"], strict=True):
            rows = [(torch.tensor(x), torch.tensor(mask, dtype=torch.bool)) for x, mask in stored]
            self.rankings.append(Ranking(tuple(rows), tuple(labels)))
