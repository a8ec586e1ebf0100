"""What a reward model learns from as the policy moves: rankings of fresh samples, and a share of earlier ones.

scored groups --rankings--> fresh --Replay.mixed--> fresh + ceil(share x all) of the history --ranking_batch--> batch
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.data.collate import token_batch
from megarl.types import Group, PreferenceBatch


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Responses to one prompt: (tokens [L] int64, trainable [L] bool) and the label of each; the highest is best."""

    rows: tuple[tuple[Tensor, Tensor], ...]
    labels: tuple[float, ...]


def rankings(groups: Sequence[Group], pairs: Literal["all", "best_worst"] = "all") -> list[Ranking]:
    """Ranks the samples of each group by reward, or only the first of the best and of the worst ones.

    Groups whose rewards are all equal have no ranking.
    """
    result = []
    for group in groups:
        labels = [float(sample.reward or 0.0) for sample in group.samples]
        if len(set(labels)) > 1:
            ends = (labels.index(max(labels)), labels.index(min(labels)))
            chosen = range(len(labels)) if pairs == "all" else ends
            rows = tuple((group.samples[i].tokens, group.samples[i].trainable) for i in chosen)
            result.append(Ranking(rows, tuple(labels[i] for i in chosen)))
    return result


def ranking_batch(rankings: Sequence[Ranking]) -> PreferenceBatch:
    """Returns a row for each response, and every pair of unequal labels."""
    pairs, group = [], []
    for number, ranking in enumerate(rankings):
        labels, first = ranking.labels, len(group)
        pairs += [(first + i, first + j) for i, j in permutations(range(len(labels)), 2) if labels[i] > labels[j]]
        group += [number] * len(labels)
    batch = token_batch([row for ranking in rankings for row in ranking.rows], temperature=1.0)
    return PreferenceBatch(
        **{x.name: getattr(batch, x.name) for x in fields(batch)},
        group=torch.tensor(group, dtype=torch.int64),
        pairs=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        margins=torch.zeros(len(pairs)),
    )


@dataclass
class Replay:
    """The rankings of earlier iterations; `state` and `restore` are for checkpoints."""

    share: float  # of the rankings in a batch
    capacity: int
    seed: int
    history: list[Ranking] = field(default_factory=list)

    def mixed(self, fresh: Sequence[Ranking], key: str) -> list[Ranking]:
        """Returns n rankings: those of `fresh`, and ceil(share x n) of the history, fewer if it has fewer.

        They are drawn without replacement, the same for the same `key`.
        """
        share = Fraction(str(self.share))  # 0.1 x 70 in floats is more than 7
        count = min(math.ceil(share * len(fresh) / (1 - share)), len(self.history))
        return [*fresh, *random.Random(f"{self.seed}/{key}").sample(self.history, count)]

    def add(self, fresh: Sequence[Ranking]) -> None:
        self.history = [*self.history, *fresh][-self.capacity :]

    def state(self) -> dict[str, Any]:
        rows = [[(x.tolist(), mask.tolist()) for x, mask in ranking.rows] for ranking in self.history]
        return {"rows": rows, "labels": [list(ranking.labels) for ranking in self.history]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.history = [
            Ranking(tuple((torch.tensor(x), torch.tensor(mask, dtype=torch.bool)) for x, mask in rows), tuple(labels))
            for rows, labels in zip(state["rows"], state["labels"], strict=True)
        ]
