"""An engine over plain transformers, one on each rank, in fp32: roles.Engine without vLLM."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from megarl.data.tokenizer import stop_token_ids
from megarl.layout import Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.shards import ShardSlice, slices_of
from megarl.rollout.sampling import check_new, check_running, unsampled
from megarl.run.context import RankContext
from megarl.types import Request, Sample, SampleKey
from megarl.weights.sync.checksum import positional_checksum
from megarl.weights.sync.copies import copy_and_verify
from megarl.weights.sync.execute import split_message


@dataclass
class Receiver:
    """publish.WeightReceiver. Writes into the model's tensors, by their names in the checkpoint."""

    tensors: dict[str, Tensor]
    slices: list[ShardSlice]
    version: int | None = None
    loaded: Counter[str] = field(default_factory=Counter)
    device = torch.device("cpu")

    def begin(self, *, check_placement: bool) -> None:
        self.abort()

    def write(self, message: Any, flat: Tensor) -> Tensor:
        parts, views = [], []
        for transfer, part in split_message(message, flat):
            parts.append(part)
            views.append(self.view(transfer.destination))
            self.loaded[transfer.destination.name] += part.numel()
        return copy_and_verify(flat, parts, views)

    def view(self, part: ShardSlice) -> Tensor:
        ends = zip(part.start, part.shape, strict=True)
        return self.tensors[part.name][tuple(slice(first, first + size) for first, size in ends)]

    def seal(self) -> Counter[str]:
        return self.loaded

    def positional_checksums(self) -> Tensor:
        return torch.stack([positional_checksum(self.view(x), x.start) for x in self.slices])

    def finish(self, version: int) -> None:
        self.version = version

    def abort(self) -> None:
        self.version = None
        self.loaded.clear()


@dataclass
class TransformersEngine:
    """roles.Engine. `poll` samples one request, to its end."""

    model: Any
    receiver: Receiver
    rank: RankContext
    max_model_len: int = 64
    is_asleep: bool = False
    bytes_asleep: int = 0
    waiting: dict[SampleKey, Request] = field(default_factory=dict)

    @classmethod
    def start(cls, rank: RankContext) -> TransformersEngine:
        config = transformers.AutoConfig.from_pretrained(rank.model_folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        slices = slices_of(engine_table(rank.shape), rank.shape, Layout.of(Parallel(), 1, 0))
        return cls(model.requires_grad_(False), Receiver(model.state_dict(), list(slices)), rank)

    def submit(self, requests: list[Request]) -> None:
        check_new(requests, self.waiting)
        self.waiting |= {request.key: request for request in requests}

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        return [self.sample(self.waiting.pop(key)) for key in list(self.waiting)[:1]]

    def abort(self, keys: list[SampleKey]) -> list[Sample]:
        check_running(keys, self.waiting)
        return [unsampled(self.waiting.pop(key)) for key in keys]

    def running(self) -> int:
        return len(self.waiting)

    def sample(self, request: Request) -> Sample:
        torch.manual_seed(request.seed)
        stops = stop_token_ids(self.rank.tokenizer, self.rank.config.rollout.stop)
        end = len(request.tokens) + self.rank.config.rollout.max_tokens
        tokens, logprobs, finish = list(request.tokens), [0.0] * len(request.tokens), "length"
        while len(tokens) < end and finish == "length":
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            scores = (logits / (request.temperature or 1e-6)).log_softmax(0)
            tokens.append(int(scores.exp().multinomial(1)))
            logprobs.append(float(scores[tokens[-1]]))
            finish = "stop" if tokens[-1] in stops else "length"
        is_new = torch.arange(len(tokens)) >= len(request.tokens)
        versions = torch.where(is_new, self.receiver.version, -1).int()
        tensors = (torch.tensor(tokens), is_new, torch.tensor(logprobs), versions)
        return Sample(*request.key, *tensors, finish)

    def complete(self, prompts: Any, *, max_tokens: int) -> list[Tensor]:
        options = {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens, "do_sample": True}
        return [self.model.generate(torch.tensor([x]), **options)[0] for x in prompts]

    def score(self, rows: Any) -> list[Tensor]:
        scores = [self.model(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
        return [x.gather(1, row[1:, None])[:, 0] for x, row in zip(scores, rows, strict=True)]

    def finish(self) -> None: ...
    def sleep(self) -> None: ...
    def wake(self, part: str) -> None: ...
