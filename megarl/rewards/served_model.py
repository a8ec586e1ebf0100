"""Log-probs of a model behind an OpenAI-compatible URL that returns `prompt_logprobs`, as vLLM does.

a row of the batch --POST <url>/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": 0}-->
    choices[0].prompt_logprobs = [null, {"17": {"logprob": -0.3, ...}}, ...], one for each token, at temperature 1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megarl.config.schema import FrozenModel, Reward
from megarl.rewards.interface import ScoreError, parse_options
from megarl.rewards.remote import HttpClient, HttpOptions, finite_number
from megarl.types import CheckFailed, TokenBatch
from megarl.weights.transports import Transport

MAX_BYTES = 256 << 20  # of an answer: about 100 a token


def client_of(served: FrozenModel, key: str) -> HttpClient:
    """Raises ValueError, naming the section `key`, if the URL or an option is wrong."""
    url = f"{(served.url or '').rstrip('/')}/completions"
    try:
        options = parse_options(HttpOptions, Reward(name=url, options=served.options))
        return replace(HttpClient.of(url, options, reward=url), max_bytes=MAX_BYTES)
    except ValueError as error:
        raise ValueError(str(error).replace("rewards: name", f"{key}.url").replace("rewards:", f"{key}:")) from None


@dataclass(frozen=True)
class ServedModel:
    """Scores batches; rank 0 sends the requests. Every rank must call it."""

    client: HttpClient
    model: str | None  # None: the server's only one
    transport: Transport

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Returns the log-probs of `labels`, as Trainer.forward; or raises CheckFailed, on every rank, without them."""
        logprobs_T, error = torch.zeros(batch.num_tokens), ""
        if self.transport.rank == 0:
            try:
                self._ask(batch, logprobs_T)
            except ScoreError as failure:
                error = f"no log-probs ({failure.cause}): {failure}; resume the run once the server answers"
        self.transport.barrier("the log-probs of a served model", patience=12)  # times launch.timeout_s
        if error := self.transport.gather(error)[0]:
            raise CheckFailed(error)
        return self.transport.sum(logprobs_T)

    def _ask(self, batch: TokenBatch, logprobs_T: Tensor) -> None:
        common = {"max_tokens": 1, "prompt_logprobs": 0} | ({} if self.model is None else {"model": self.model})
        spans = [span for span in pairwise(batch.cu_seqlens.tolist()) if batch.mask[slice(*span)].any()]
        answers = self.client.ask([{**common, "prompt": batch.tokens[slice(*span)].tolist()} for span in spans])
        for (start, end), answer in zip(spans, answers, strict=True):
            if isinstance(answer, ScoreError):
                raise answer
            for t in (start + batch.mask[start:end].nonzero().flatten()).tolist():
                try:
                    value = answer["choices"][0]["prompt_logprobs"][t + 1 - start][str(int(batch.labels[t]))]["logprob"]
                except (LookupError, TypeError):
                    detail = f"{self.client.url} returned {self.client.quote(answer)}, without the log-probs of a token"
                    raise ScoreError("bad_answer", detail) from None
                logprobs_T[t] = finite_number(value, self.client.url)
