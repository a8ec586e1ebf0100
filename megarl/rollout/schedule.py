"""Decides which requests to sample, and which samples form groups.

    prompts --requests--> generate --scored samples--> shape --> groups --keep--> Rollout
       ^------------------------- refill, for groups that are not kept -----'

Every round, the first one too, asks for as many prompts as will probably fill the batch, by the share of groups that
were kept in this and the last steps. The first `count` kept groups of the stream are trained on, and the stream goes on
after the last of them. So what is trained on depends on samples alone: not on time, layout, or how many were asked for.

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
KEPT, ASKED = "groups/kept", "groups/asked"  # of the last steps, in Prompts.kept; each step halves the earlier ones
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


def num_prompts(missing: int, kept: float, asked: float) -> int:
    """How many prompts to ask for so that probably `missing` groups are kept, where `kept` of `asked` were before.

    More than their mean by a standard deviation: five times in six no further round is needed.
    """
    share = min(max(kept, 1.0) / asked, 1.0) if asked else 1.0
    return math.ceil((missing + math.sqrt(missing * (1 - share))) / share)


@dataclass
class Rollouts:
    """roles.Rollouts."""

    generate: Generate
    samples_per_prompt: int
    temperature: float
    run_seed: int
    keep: Callable[[Group], bool] | None = None  # groups that are not kept are replaced by fresh prompts
    max_refills: int = Algorithm().max_refills  # at most this many times `count` fresh prompts per step
    shape: Callable[[Sample], Sample] | None = None  # changes rewards (reward_shaping.py)
    greedy_baseline: bool = False  # add a greedy sample per prompt, whose reward is the group's baseline (ReMax)
    empty_steps: int | None = None  # number of empty steps in a row; None: no step has had a group yet

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout:
        """Returns `count` groups, or fewer after `max_refills`; each has at least one scored sample.

        `Rollout.counts` counts, by cause, dropped samples and groups, and scored samples whose reward names a cause.
        A step without groups is empty and changes nothing. Raises ValueError if no step has had a group yet,
        CheckFailed after MAX_EMPTY_STEPS empty steps in a row.
        """
        counts: Counter[str] = Counter({"rollout/refills": 0})
        generated: list[Group] = []
        kept: list[Group] = []
        flat: list[Group] = []
        taken: list[Prompt] = []
        limit = (1 + self.max_refills) * count
        while not taken or (len(kept) < (count if self.keep else 1) and len(taken) < limit):
            so_far = (len(kept) + prompts.kept.get(KEPT, 0.0), len(taken) + prompts.kept.get(ASKED, 0.0))
            size = num_prompts(count - len(kept), *so_far) if self.keep else count
            if taken:  # at most as many again, and more each time
                counts["rollout/refills"] += 1
                size = min(max(size, 2 ** counts["rollout/refills"]), len(taken))
            asked = prompts.take(min(size, limit - len(taken)))
            taken += asked
            groups = self._groups(asked, version, counts)
            generated += groups
            for group in groups:
                (kept if self.keep is None or self.keep(group) else flat).append(group)
        if self.keep:
            for name, number in ((KEPT, len(kept)), (ASKED, len(taken))):
                prompts.kept[name] = prompts.kept.get(name, 0.0) / 2 + number
            if len(kept) >= count:
                last = kept[count - 1].prompt.prompt_id
                prompts.put_back([prompt for prompt in taken if prompt.prompt_id > last])
        counts["groups/surplus"], kept = max(len(kept) - count, 0), kept[:count]
        if not kept:  # train on groups without spread: the KL and entropy terms still have gradients
            kept, flat = flat[:count], flat[count:]
            counts["groups/kept_flat"] = len(kept)
        counts["groups/filtered"] = len(flat)
        self._count_empty(version, limit, counts, is_empty=not kept)
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
