"""What to sample, and which samples become groups: pure, with the sampling and scoring injected.

    prompts -> requests -> generate (sample + score, on the ranks that hold the engines) -> shape -> groups
            -> keep? -> refill

Every rank runs this with the same inputs and gets the same groups.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.roles import Prompts
from megarl.types import CheckFailed, Group, Prompt, Rollout, Sample

__all__ = ["Request", "Rollouts", "digest", "digest_samples", "has_spread", "request_seed"]

MAX_EMPTY_STEPS = 3  # in a row: a reward that is down for longer will not come back by itself
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


def has_spread(group: Group, *, mask_truncated: bool = False) -> bool:
    """Not all rewards of the group are equal, as outcomes or as steps: only such a group has advantages."""
    samples = [s for s in group.samples if not (mask_truncated and s.finish == "length")]
    steps = {reward for sample in samples for _, reward in sample.step_rewards}
    return len({sample.reward for sample in samples}) > 1 or len(steps) > 1


def digest(groups: Sequence[Group]) -> str:
    """`digest_samples` of all groups."""
    return digest_samples(sample for group in groups for sample in group.samples)


def digest_samples(samples: Iterable[Sample]) -> str:
    """sha256 over prompt id, sample index and tokens of every sample, in order."""
    hashed = hashlib.sha256()
    for sample in samples:
        hashed.update(f"{sample.prompt_id} {sample.index} {sample.tokens.tolist()}\n".encode())
    return hashed.hexdigest()


@dataclass
class Rollouts:
    """roles.Rollouts."""

    generate: Generate
    samples_per_prompt: int
    temperature: float
    run_seed: int
    keep: Callable[[Group], bool] | None = None  # a group that is not kept is replaced by a fresh prompt's
    max_refills: int = 4  # rounds of fresh prompts; then the step goes on with the groups there are
    shape: Callable[[Sample], Sample] | None = None  # what the objective changes of a reward
    greedy_baseline: bool = False  # one more sample a prompt, greedy, whose reward is the group's baseline (ReMax)
    empty_steps: int | None = None  # in a row, up to now; None: no step had a group yet

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout:
        """`count` groups, or fewer when refills run out; each has at least one scored sample. No group at all is an
        empty step, which changes nothing.

        `Rollout.counts` holds what was left out, by cause, and what was scored with a cause (such as code that did
        not end).

        Raises ValueError when that happens before any step had a group, CheckFailed at the third one in a row.
        """
        counts: Counter[str] = Counter()
        generated: list[Group] = []
        kept: list[Group] = []
        flat: list[Group] = []
        for refill in range(1 + self.max_refills):
            counts["rollout/refills"] = refill
            groups = self._groups(prompts.take(count - len(kept)), version, counts)
            generated += groups
            for group in groups:
                (kept if self.keep is None or self.keep(group) else flat).append(group)
            if len(kept) == count or (self.keep is None and kept):
                break
        if not kept:  # as if nothing were filtered: without advantages, the terms for KL and entropy still act
            kept, flat = flat[:count], flat[count:]
            counts["groups/kept_flat"] = len(kept)
        counts["groups/filtered"] = len(flat)
        self._note(version, (1 + self.max_refills) * count, counts, empty=not kept)
        return Rollout(tuple(kept), tuple(generated), counts, digest(kept))

    def _note(self, version: int, asked: int, counts: Counter[str], *, empty: bool) -> None:
        if not empty:
            self.empty_steps = 0
            return
        what = (
            f"step {version}: none of {asked} groups can be trained on ({dict(counts)}); check the rewards (each "
            "cause is counted by name)"
        )
        counts["rollout/empty"] = 1
        if self.empty_steps is None:
            raise ValueError(what)
        self.empty_steps += 1
        if self.empty_steps >= MAX_EMPTY_STEPS:
            raise CheckFailed(f"{what}; so it was for {self.empty_steps} steps in a row")

    def _groups(self, prompts: Sequence[Prompt], version: int, counts: Counter[str]) -> list[Group]:
        """Sample every prompt; leave out samples without a reward, and groups without samples or baseline."""
        indices = [(index, self.temperature) for index in range(self.samples_per_prompt)]
        if self.greedy_baseline:
            indices.append((self.samples_per_prompt, 0.0))
        requests = [
            Request(prompt, index, request_seed(self.run_seed, version, prompt.prompt_id, index), temperature)
            for prompt in prompts
            for index, temperature in indices
        ]
        by_prompt: dict[int, list[Sample]] = {prompt.prompt_id: [] for prompt in prompts}
        for sample in self.generate(requests, version=version):
            by_prompt[sample.prompt_id].append(self.shape(sample) if self.shape else sample)
        groups = [self._group(prompt, by_prompt[prompt.prompt_id]) for prompt in prompts]
        for group in groups:
            counts.update({"samples/dropped": sum(group.dropped.values())} | dict(group.dropped))
            counts.update(cause for sample in group.samples for cause in sample.extra.get("counted", ()))
            no_baseline = self.greedy_baseline and group.baseline is None
            counts["groups/no_baseline"] += no_baseline
            counts["groups/empty"] += not group.samples
        return [g for g in groups if g.samples and not (self.greedy_baseline and g.baseline is None)]

    def _group(self, prompt: Prompt, samples: Sequence[Sample]) -> Group:
        """The scored samples by index, the greedy one's reward beside them. Why a sample has no reward is in
        ``extra["dropped"]``."""
        dropped = Counter(_cause(sample.extra) for sample in samples if sample.reward is None)
        scored = sorted((s for s in samples if s.reward is not None), key=lambda sample: sample.index)
        drawn = tuple(sample for sample in scored if sample.index < self.samples_per_prompt)
        baseline = scored[-1].reward if len(scored) > len(drawn) else None
        return Group(prompt, drawn, baseline, dict(dropped))


def _cause(extra: Mapping[str, Any]) -> str:
    return str(extra.get("dropped", "reward/none"))
