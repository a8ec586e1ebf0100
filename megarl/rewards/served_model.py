"""Log-probs of a model behind an OpenAI-compatible URL that returns `prompt_logprobs`, like vLLM.

a row of the batch
--POST <url>/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": top_k}-->
choices[0].prompt_logprobs = [null, {"17": {"logprob": -0.3, ...}}, ...]

The list has one entry per token: the log-probs, at temperature 1, of that token and of the `top_k`
most likely ones.
"""

from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.config.schema import FrozenModel
from megarl.config.section import validate_options
from megarl.rewards.interface import ScoreError
from megarl.rewards.remote import HttpClient, HttpOptions, finite_number
from megarl.types import CheckFailed, TokenBatch, TokenOutputs
from megarl.weights.sync.transports import Transport

MAX_BYTES = 256 << 20  # size limit of an answer; a log-prob takes about 100 bytes


def client_of(served: FrozenModel, key: str) -> HttpClient:
    """Returns a client for the completions of a served model.

    Raises ValueError, naming the section `key`, if the URL or an option is wrong.
    """
    url = f"{(served.url or '').rstrip('/')}/completions"
    setting = f"{key}.url"
    options = validate_options(HttpOptions, served.options, f"{setting}={url!r}")
    return HttpClient(url, options, name=url, setting=setting, max_bytes=MAX_BYTES)


@dataclass(frozen=True)
class ServedModel:
    """Gets log-probs from a server. A collective: all ranks call it, and rank 0 sends requests."""

    client: HttpClient
    model: str | None  # None: the server's only model
    transport: Transport
    top_k: int = 0

    def __call__(self, batch: TokenBatch) -> TokenOutputs:
        """Returns the log-probs that Trainer.forward would, and those of the `top_k` likeliest
        tokens. Raises CheckFailed on every rank if a request fails.
        """
        # ids below 2^24 are exact in fp32
        numbers_TN = torch.zeros(batch.num_tokens, 1 + 2 * self.top_k)
        error = ""
        if self.transport.rank == 0:
            try:
                self._ask(batch, numbers_TN)
            except ScoreError as failure:
                error = (
                    f"no log-probs ({failure.cause}): {failure}; "
                    "resume the run once the server answers"
                )
                if self.top_k > 20:
                    error += f" (vLLM: with --max-logprobs {self.top_k} or more; its default is 20)"
        # patience is in units of launch.timeout_s
        self.transport.barrier("the log-probs of a served model", patience=12)
        error = self.transport.gather(error)[0]
        if error:
            raise CheckFailed(error)
        numbers_TN = self.transport.sum(numbers_TN)
        label_T1, top_TK, ids_TK = numbers_TN.split([1, self.top_k, self.top_k], 1)
        if not self.top_k:
            return TokenOutputs(label_T1[:, 0])
        return TokenOutputs(label_T1[:, 0], extra_labels_TK=ids_TK.long(), extra_logprobs_TK=top_TK)

    def _ask(self, batch: TokenBatch, numbers_TN: Tensor) -> None:
        """Writes the log-probs of the label and of the likeliest tokens, and the ids of the latter,
        into `numbers_TN` as each answer arrives; parsed JSON takes about 400 bytes per log-prob.
        """
        url = self.client.url
        spans = pairwise(batch.cu_seqlens.tolist())
        spans = [span for span in spans if batch.mask[slice(*span)].any()]

        def read(index: int, answer: Any) -> None:
            start, end = spans[index]
            for t in (start + batch.mask[start:end].nonzero().flatten()).tolist():
                try:
                    tokens = answer["choices"][0]["prompt_logprobs"][t + 1 - start]
                    logprob = finite_number(tokens[str(int(batch.labels[t]))]["logprob"], url)
                    pairs = [
                        (finite_number(one["logprob"], url), int(id)) for id, one in tokens.items()
                    ]
                    top = nlargest(self.top_k, pairs)
                    if len(top) < self.top_k:
                        raise LookupError
                except (LookupError, TypeError, AttributeError, ValueError):
                    raise ScoreError(
                        "bad_answer",
                        f"{url} returned {self.client.quote(answer)}, "
                        f"without the log-probs of a token (prompt_logprobs={self.top_k})",
                    ) from None
                columns = zip(*top, strict=True)
                numbers_TN[t] = torch.tensor([logprob, *chain.from_iterable(columns)])

        common: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": self.top_k}
        if self.model:
            common["model"] = self.model
        prompts = [{**common, "prompt": batch.tokens[slice(*span)].tolist()} for span in spans]
        for failure in self.client.ask(prompts, read):
            if failure is not None:
                raise failure
