"""Requests to a roles.Sampler: their seeds, and what every sampler does with them alike."""

from collections.abc import Collection, Iterable, Sequence

import torch

from megarl.data.tasks import hash31
from megarl.roles import Sampler
from megarl.types import CheckFailed, Request, Sample, SampleKey


def request_seed(run_seed: int, step: int, prompt_id: int, index: int, turn: int = 0) -> int:
    """Hashes these numbers to 31 bits, the same in every layout and process."""
    later = f"/{turn}" if turn else ""
    return hash31(f"{run_seed}/{step}/{prompt_id}/{index}{later}")


def sample_all(sampler: Sampler, requests: Sequence[Request]) -> list[Sample]:
    """Samples these, and returns them by prompt and index."""
    sampler.submit(requests)
    samples = []
    while sampler.running():
        samples += sampler.poll()
    return sorted(samples, key=lambda sample: sample.key)


def unsampled(request: Request) -> Sample:
    """Returns the sample of a request that was aborted before its first token."""
    tokens = torch.tensor(request.tokens)
    return Sample(
        request.prompt.prompt_id,
        request.index,
        tokens,
        torch.zeros_like(tokens, dtype=torch.bool),
        torch.zeros(len(tokens)),
        torch.full_like(tokens, -1, dtype=torch.int32),
        "abort",
    )


def check_version(samples: Iterable[Sample], version: int) -> None:
    """Raises CheckFailed if weights of another version sampled a token."""
    for sample in samples:
        others = sample.versions[sample.trainable & (sample.versions != version)].tolist()
        if others:
            raise CheckFailed(
                f"the engine sampled with weights of version {others[0]}, not {version}; publish "
                "them first"
            )


def check_new(requests: Iterable[Request], running: Collection[SampleKey]) -> None:
    """Raises ValueError if a request has the key of one that is running."""
    seen = set(running)
    for request in requests:
        if request.key in seen:
            raise ValueError(f"{name_of(request.key)} was submitted twice before it came back")
        seen.add(request.key)


def check_running(keys: Sequence[SampleKey], running: Collection[SampleKey]) -> None:
    """Raises ValueError if one of the keys is not running, or is there twice."""
    for key in keys:
        if key not in running or keys.count(key) > 1:
            raise ValueError(
                f"{name_of(key)} cannot be aborted: it was aborted before, has come back, or was "
                "never submitted"
            )


def name_of(key: SampleKey) -> str:
    return f"sample {key[1]} of prompt {key[0]}"
