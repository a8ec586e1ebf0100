"""Log-probs of a model behind an OpenAI-compatible URL that returns `prompt_logprobs`, as vLLM does.

a row of the batch --POST <url>/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": top_k}-->
    choices[0].prompt_logprobs = [null, {"17": {"logprob": -0.3, ...}}, ...], one for each token, at temperature 1:
    of that token, and of the `top_k` likeliest ones
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.config.schema import FrozenModel, Reward
from megarl.rewards.interface import ScoreError, parse_options
from megarl.rewards.remote import HttpClient, HttpOptions, finite_number
from megarl.types import CheckFailed, TokenBatch, TokenOutputs
from megarl.weights.transports import Transport

MAX_BYTES = 256 << 20  # of an answer: about 100 for each log-prob


def client_of(served: FrozenModel, key: str) -> HttpClient:
    """Raises ValueError, naming the section `key`, if the URL or an option is wrong."""
    url = f"{(served.url or '').rstrip('/')}/completions"
    try:
        options = parse_options(HttpOptions, Reward(name=url, options=served.options))
        return replace(HttpClient.of(url, options, reward=url), max_bytes=MAX_BYTES)
    except ValueError as error:
        raise ValueError(
            str(error).replace("rewards: name", f"{key}.url").replace("rewards:", f"{key}:")
        ) from None


@dataclass(frozen=True)
class ServedModel:
    """Scores batches; rank 0 sends the requests. Every rank must call it."""

    client: HttpClient
    model: str | None  # None: the server's only one
    transport: Transport
    top_k: int = 0

    def __call__(self, batch: TokenBatch) -> TokenOutputs:
        """Returns what Trainer.forward would, with `top_k`; or raises CheckFailed, on every rank, without it."""
        numbers_TN, error = (
            torch.zeros(batch.num_tokens, 1 + 2 * self.top_k),
            "",
        )  # ids below 2^24 are exact in fp32
        if self.transport.rank == 0:
            try:
                self._ask(batch, numbers_TN)
            except ScoreError as failure:
                error = f"no log-probs ({failure.cause}): {failure}; resume the run once the server answers"
                if self.top_k > 20:
                    error += f" (vLLM: with --max-logprobs {self.top_k} or more; its default is 20)"
        self.transport.barrier(
            "the log-probs of a served model", patience=12
        )  # times launch.timeout_s
        if error := self.transport.gather(error)[0]:
            raise CheckFailed(error)
        label_T1, top_TK, ids_TK = self.transport.sum(numbers_TN).split(
            [1, self.top_k, self.top_k], 1
        )
        top = {"extra_labels_TK": ids_TK.long(), "extra_logprobs_TK": top_TK} if self.top_k else {}
        return TokenOutputs(label_T1[:, 0], **top)

    def _ask(self, batch: TokenBatch, numbers_TN: Tensor) -> None:
        """Each answer is reduced to numbers when it arrives: in JSON a log-prob takes about 400 bytes."""

        def read(start: int, end: int, answer: Any) -> None:
            for t in (start + batch.mask[start:end].nonzero().flatten()).tolist():
                numbers_TN[t] = torch.tensor(
                    self._numbers(answer, t + 1 - start, str(int(batch.labels[t])))
                )

        common = {"max_tokens": 1, "prompt_logprobs": self.top_k} | (
            {"model": self.model} if self.model else {}
        )
        spans = [
            span for span in pairwise(batch.cu_seqlens.tolist()) if batch.mask[slice(*span)].any()
        ]
        prompts = [{**common, "prompt": batch.tokens[slice(*span)].tolist()} for span in spans]
        for failure in self.client.ask(prompts, [partial(read, *span) for span in spans]):
            if failure is not None:
                raise failure

    def _numbers(self, answer: Any, position: int, label: str) -> list[float]:
        """Returns log-probs of the label and of the likeliest tokens, and the ids of these."""
        url = self.client.url
        try:
            tokens = answer["choices"][0]["prompt_logprobs"][position]
            logprobs = [finite_number(tokens[label]["logprob"], url)]
            top = nlargest(
                self.top_k,
                ((finite_number(one["logprob"], url), int(id)) for id, one in tokens.items()),
            )
            if len(top) < self.top_k:
                raise LookupError
        except (LookupError, TypeError, AttributeError, ValueError):
            detail = f"without the log-probs of a token (prompt_logprobs={self.top_k})"
            raise ScoreError(
                "bad_answer", f"{url} returned {self.client.quote(answer)}, {detail}"
            ) from None
        return [*logprobs, *(logprob for logprob, _ in top), *(id for _, id in top)]
