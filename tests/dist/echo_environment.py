"""An environment of two turns: it answers a response with the response, reversed. roles.Sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megarl.roles import Sampler
from megarl.types import Request, Sample, SampleKey


@dataclass
class Echo:
    sampler: Sampler
    first: dict[SampleKey, Request] = field(default_factory=dict)
    said: dict[SampleKey, Sample] = field(default_factory=dict)

    def submit(self, requests: Sequence[Request]) -> None:
        self.first |= {request.key: request for request in requests}
        self.sampler.submit(requests)

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        ended = []
        for sample in self.sampler.poll(timeout_s):
            if sample.key in self.said:
                ended.append(both(self.said.pop(sample.key), sample))
                continue
            request = self.first.pop(sample.key)
            self.said[sample.key] = sample
            response = sample.tokens[sample.trainable]
            answered = torch.cat([response, response.flip(0)])
            seed = request.seed + 1
            self.sampler.submit([replace(request, prefix=answered, turn=1, seed=seed)])
        return ended

    def abort(self, keys: Sequence[SampleKey]) -> list[Sample]:
        return self.sampler.abort(keys)

    def running(self) -> int:
        return self.sampler.running()


def both(first: Sample, second: Sample) -> Sample:
    """Returns the second turn's sample with the first one's response trained on, too."""
    length = len(first.tokens)
    tensors = {}
    for name in ("trainable", "rollout_logprobs", "versions"):
        tensors[name] = torch.cat([getattr(first, name), getattr(second, name)[length:]])
    return replace(second, **tensors)
