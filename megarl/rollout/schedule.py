"""Decides which requests to sample, and which samples form groups.

    prompts --requests--> generate --scored samples--> shape --> groups --keep--> Rollout
       ^------------------------- refill, for groups that are not kept -----'

A refill asks for as many prompts as will fill the batch if the share of kept groups stays what it was in this step; the
first `count` kept groups of the stream are trained on. Their number depends on samples alone, never on time or layout.

`generate` samples and scores. Every rank runs this with the same inputs and returns the same groups.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megarl.config.schema import Algorithm
from megarl.data.tasks import hash31
from megarl.roles import Prompts
from megarl.types import CheckFailed, Group, Prompt, Request, Rollout, Sample

MAX_EMPTY_STEPS = 3  # in a row
Generate = Callable[..., list[Sample]]  # generate(requests, version=) -> scored samples, the same on every rank


def request_seed(run_seed: int, step: int, prompt_id: int, index: int) -> int:
    """Hashes these numbers to 31 bits, the same in every layout and process."""
    return hash31(f"{run_seed}/{step}/{prompt_id}/{index}")


def has_spread(group: Group, *, mask_truncated: bool = False) -> bool:
    """Whether outcome or step rewards differ within the group; otherwise its advantages are zero."""
    samples = [s for s in group.samples if not (mask_truncated and s.finish == "length")]
    steps = {reward for sample in samples for _, reward in sample.step_rewards}
    return len({sample.reward for sample in samples}) > 1 or len(steps) > 1


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
    keep: Callable[[Group], bool] | None = None  # groups that are not kept are replaced by fresh prompts
    max_refills: int = Algorithm().max_refills  # rounds of fresh prompts per step, each of at most `count`
    shape: Callable[[Sample], Sample] | None = None  # changes rewards (reward_shaping.py)
    greedy_baseline: bool = False  # add a greedy sample per prompt, whose reward is the group's baseline (ReMax)
    empty_steps: int | None = None  # number of empty steps in a row; None: no step has had a group yet

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout:
        """Returns `count` groups, or fewer after `max_refills`; each has at least one scored sample.

        `Rollout.counts` counts, by cause, dropped samples and groups, and scored samples whose reward names a cause.
        A step without groups is empty and changes nothing. Raises ValueError if no step has had a group yet,
        CheckFailed after MAX_EMPTY_STEPS empty steps in a row.
        """
        counts: Counter[str] = Counter()
        generated: list[Group] = []
        kept: list[Group] = []
        flat: list[Group] = []
        taken = size = count
        for refill in range(1 + self.max_refills):
            counts["rollout/refills"] = refill
            groups = self._groups(prompts.take(size), version, counts)
            generated += groups
            for group in groups:
                (kept if self.keep is None or self.keep(group) else flat).append(group)
            if len(kept) >= count or (self.keep is None and kept):
                break
            # enough for the missing groups if as many are kept as so far, instead of a round for each half of them
            size = min(math.ceil((count - len(kept)) * taken / max(len(kept), 1)), count)
            taken += size
        counts["groups/surplus"], kept = max(len(kept) - count, 0), kept[:count]
        if not kept:  # train on groups without spread: the KL and entropy terms still have gradients
            kept, flat = flat[:count], flat[count:]
            counts["groups/kept_flat"] = len(kept)
        counts["groups/filtered"] = len(flat)
        self._count_empty(version, (1 + self.max_refills) * count, counts, is_empty=not kept)
        digest = digest_samples(sample for group in kept for sample in group.samples)
        return Rollout(tuple(kept), tuple(generated), counts, digest)

    def _count_empty(self, version: int, num_groups: int, counts: Counter[str], *, is_empty: bool) -> None:
        if not is_empty:
            self.empty_steps = 0
            return
        message = f"step {version}: none of {num_groups} groups can be trained on ({dict(counts)}); check the rewards"
        counts["rollout/empty"] = 1
        if self.empty_steps is None:
            raise ValueError(message)
        self.empty_steps += 1
        if self.empty_steps >= MAX_EMPTY_STEPS:
            raise CheckFailed(f"{message}; this is empty step {self.empty_steps} in a row")

    def _groups(self, prompts: Sequence[Prompt], version: int, counts: Counter[str]) -> list[Group]:
        """Samples every prompt; drops samples without a reward, and groups without samples or baseline."""
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
            counts["rollout/prompt_tokens_computed"] += sample.prompt_tokens_computed
            by_prompt[sample.prompt_id].append(self.shape(sample) if self.shape else sample)
        groups = [self._group(prompt, by_prompt[prompt.prompt_id]) for prompt in prompts]
        usable = []
        for group in groups:
            counts.update({"samples/dropped": sum(group.dropped.values())} | dict(group.dropped))
            counts.update(cause for sample in group.samples for cause in sample.extra.get("counted", ()))
            lacks_baseline = self.greedy_baseline and group.baseline is None
            counts["groups/no_baseline"] += lacks_baseline
            counts["groups/empty"] += not group.samples
            if group.samples and not lacks_baseline:
                usable.append(group)
        return usable

    def _group(self, prompt: Prompt, samples: Sequence[Sample]) -> Group:
        """The scored samples by index, and the greedy sample's reward."""
        dropped = Counter(str(s.extra.get("dropped", "reward/none")) for s in samples if s.reward is None)
        scored = sorted((s for s in samples if s.reward is not None), key=lambda sample: sample.index)
        drawn = tuple(sample for sample in scored if sample.index < self.samples_per_prompt)
        baseline = scored[-1].reward if len(scored) > len(drawn) else None
        return Group(prompt, drawn, baseline, dict(dropped))
