"""What to sample, and which samples become groups: pure, with the sampling and scoring injected.

    prompts -> requests -> generate (sample + score, on the ranks that hold the engines) -> groups -> keep? -> refill

Every rank runs this with the same inputs and gets the same groups.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.roles import Prompts
from megarl.types import Group, Prompt, Sample

__all__ = ["Request", "Rollouts", "digest", "has_spread", "request_seed"]

Generate = Callable[..., list[Sample]]  # generate(requests, version=) -> scored samples, the same on every rank


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw: `index` is which of the prompt's samples, `seed` fixes its random stream."""

    prompt: Prompt
    index: int
    seed: int
    temperature: float


def request_seed(run_seed: int, step: int, prompt_id: int, index: int) -> int:
    """31 bits that depend on nothing but these four numbers: not on the layout, not on the Python process."""
    text = f"{run_seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") & 0x7FFFFFFF


def has_spread(group: Group) -> bool:
    """Not all rewards of the group are equal: only such a group has a group-relative advantage."""
    return len({sample.reward for sample in group.samples}) > 1


def digest(groups: Sequence[Group]) -> str:
    """sha256 over prompt id, sample index and tokens of every sample, in order."""
    hashed = hashlib.sha256()
    for group in groups:
        for sample in group.samples:
            hashed.update(f"{sample.prompt_id} {sample.index} {sample.tokens.tolist()}\n".encode())
    return hashed.hexdigest()


@dataclass
class Rollouts:
    """roles.Rollouts. After `collect`, `counts` says what of the last step was left out, by cause."""

    generate: Generate
    samples_per_prompt: int
    temperature: float
    run_seed: int
    keep: Callable[[Group], bool] | None = None  # a group that is not kept is replaced by a fresh prompt's
    max_refills: int = 4  # rounds of fresh prompts; then the step goes on with the groups there are
    counts: Counter[str] = field(default_factory=Counter)
    generated: list[Group] = field(default_factory=list)  # every scored group of the last step, kept or not

    def collect(self, prompts: Prompts, count: int, *, version: int) -> list[Group]:
        """`count` groups (fewer when refills run out), each with at least one scored sample.

        Raises ValueError when no sample could be scored, or no group was kept.
        """
        self.counts, self.generated = Counter(), []
        kept: list[Group] = []
        for refill in range(1 + self.max_refills):
            self.counts["rollout/refills"] = refill
            groups = self._groups(prompts.take(count - len(kept)), version)
            self.generated += groups
            for group in groups:
                if self.keep is None or self.keep(group):
                    kept.append(group)
                else:
                    self.counts["groups/filtered"] += 1
            if len(kept) == count or (self.keep is None and kept):
                return kept
        if kept:
            return kept
        raise ValueError(
            f"step {version}: none of {(1 + self.max_refills) * count} groups can be trained on ({dict(self.counts)}); "
            "check the rewards (each cause is counted by name), or set algorithm.filter_zero_std: false"
        )

    def _groups(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        """Sample every prompt; leave out samples without a reward, and groups without samples."""
        requests = [
            Request(prompt, index, request_seed(self.run_seed, version, prompt.prompt_id, index), self.temperature)
            for prompt in prompts
            for index in range(self.samples_per_prompt)
        ]
        by_prompt: dict[int, list[Sample]] = {prompt.prompt_id: [] for prompt in prompts}
        for sample in self.generate(requests, version=version):
            by_prompt[sample.prompt_id].append(sample)
        groups = [_group(prompt, by_prompt[prompt.prompt_id]) for prompt in prompts]
        for group in groups:
            self.counts.update({"samples/dropped": sum(group.dropped.values())} | dict(group.dropped))
            self.counts["groups/empty"] += not group.samples
        return [group for group in groups if group.samples]


def _group(prompt: Prompt, samples: Sequence[Sample]) -> Group:
    """The scored samples by index. Why a sample has no reward is in ``extra["dropped"]``."""
    dropped = Counter(_cause(sample.extra) for sample in samples if sample.reward is None)
    scored = sorted((s for s in samples if s.reward is not None), key=lambda sample: sample.index)
    return Group(prompt, tuple(scored), dropped=dict(dropped))


def _cause(extra: Mapping[str, Any]) -> str:
    return str(extra.get("dropped", "reward/none"))
