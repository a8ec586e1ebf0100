"""Decides which requests to sample, and which samples form groups.

    prompts --requests--> generate --scored samples--> shape --> groups --keep--> Rollout
       ^------------------------- refill, for groups that are not kept -----'

Every round asks for as many prompts as will probably fill the batch, by the share of groups that were kept in this and
the last steps. The first `count` kept groups of the stream are trained on, and the stream goes on after the last of
them. So what is trained on depends on samples alone: not on time, layout, or how many were asked for.

With `max_staleness` k, the batches of the next k steps are sampled while the trainer works on this one:

    trainer  |------ step v ------|------ step v+1 ------|-- ...     a batch is begun k versions before its own step,
    k = 0    v v v |              |v+1 v+1 v+1 |         |v+2        so no token can be older. The trainer waits for the
    k = 1    v v v v v v v v v v v|v+1 v+1 v+1 v+1 v+1 v+1|v+2       slowest prompt of its batch: none is discarded

and the batch has the same prompts at every k. Nothing here knows time or engines: `generate` samples and scores at
once, `begin` while others work. Every rank returns the same groups.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from megarl.config.schema import Algorithm
from megarl.data.tasks import hash31
from megarl.roles import Prompts
from megarl.telemetry.ledger import Ledger
from megarl.types import CheckFailed, Group, Prompt, Request, Rollout, Sample, StepReport

MAX_EMPTY_STEPS = 3  # in a row
KEPT, ASKED = (
    "groups/kept",
    "groups/asked",
)  # of the last steps, in Prompts.kept; each step halves the earlier ones
Generate = Callable[
    ..., list[Sample]
]  # generate(requests, version=) -> scored samples, the same on every rank


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


def oldest_version(groups: Iterable[Group]) -> int | None:
    """Of the weights that sampled a token of these groups."""
    versions = [sample.versions[sample.trainable] for group in groups for sample in group.samples]
    return min((int(version.min()) for version in versions if version.numel()), default=None)


def num_prompts(missing: int, kept: float, asked: float) -> int:
    """Returns how many prompts to request to get `missing` groups, when `kept` of `asked` were so far: one standard
    deviation above the mean, so that five times in six no further round is needed."""
    share = min(max(kept, 1.0) / asked, 1.0) if asked else 1.0
    return math.ceil((missing + math.sqrt(missing * (1 - share))) / share)


class Round(Protocol):
    """Requests that are being sampled and scored."""

    def is_done(self) -> bool: ...
    def result(self) -> list[Sample]:
        """Waits for the slowest; the same samples on every rank, by prompt and index."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """A round whose samples are generated when they are needed."""

    generate: Callable[[], list[Sample]]

    def is_done(self) -> bool:
        return False

    def result(self) -> list[Sample]:
        return self.generate()


@dataclass
class Batch:
    """The groups of a step, as far as they are sampled."""

    taken: list[Prompt] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)  # to train on
    flat: list[Group] = field(default_factory=list)  # filtered out
    carried: list[Prompt] = field(default_factory=list)  # put back into the stream
    generated: list[Group] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter({"rollout/refills": 0}))

    def outcomes(self, trained: str) -> dict[str, list[int]]:
        """The ids of those prompts that are not carried over, as the ledger names what became of them."""
        kept, flat = (
            [group.prompt.prompt_id for group in groups] for groups in (self.kept, self.flat)
        )
        used = [prompt.prompt_id for prompt in self.taken if prompt not in self.carried]
        return {
            trained: kept,
            "filtered/no_spread": [number for number in used if number in flat],
            "dropped/not_scored": [
                number for number in used if number not in kept and number not in flat
            ],
        }


Sampling = Generator[
    Round, None, None
]  # of a batch: it goes on when the round that it has yielded is done


@dataclass
class Rollouts:
    """roles.Rollouts."""

    generate: Generate
    samples_per_prompt: int
    temperature: float
    run_seed: int
    keep: Callable[[Group], bool] | None = (
        None  # groups that are not kept are replaced by fresh prompts
    )
    max_refills: int = (
        Algorithm().max_refills
    )  # at most this many times `count` fresh prompts per step
    shape: Callable[[Sample], Sample] | None = None  # changes rewards (reward_shaping.py)
    greedy_baseline: bool = (
        False  # add a greedy sample per prompt, whose reward is the group's baseline (ReMax)
    )
    empty_steps: int | None = (
        None  # number of empty steps in a row; None: no step has had a group yet
    )
    max_staleness: int = 0
    begin: Callable[..., Round] | None = (
        None  # begin(requests, version=): samples while others train; None: `generate`
    )
    last_step: float = math.inf  # no batch is sampled for this one, or after it
    ledger: Ledger | None = None
    _open: dict[int, tuple[Batch, Sampling, Round | None]] = field(
        default_factory=dict, init=False
    )  # by step
    _collected: dict[int, Batch] = field(default_factory=dict, init=False)  # and not trained yet
    _version: int = field(default=-1, init=False)  # of the weights that sample

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout:
        """Returns `count` groups, or fewer after `max_refills`, each with a scored sample. Called for one step after
        the other, with the weights of that version. The batches of the next `max_staleness` steps are begun too.

        `Rollout.counts` counts, by cause, dropped samples and groups, and scored samples whose reward names a cause.
        A step without groups is empty and changes nothing. Raises ValueError if no step has had a group yet,
        CheckFailed after MAX_EMPTY_STEPS empty steps in a row, or if a token is older than `max_staleness` allows.
        """
        self._version = version
        for step in range(version, version + self.max_staleness + 1):
            if step not in self._open and (step < self.last_step or step == version):
                batch = Batch()
                sampling = self._sample(batch, prompts, count, step)
                self._open[step] = batch, sampling, next(sampling)
        batch = self._collected[version] = self._advance(version, wait=True)
        del self._open[version]
        for (
            step
        ) in self._open:  # those that need more prompts ask for them before the trainer trains
            self._advance(step)
        self._count_empty(
            version, (1 + self.max_refills) * count, batch.counts, is_empty=not batch.kept
        )
        if (
            oldest := oldest_version(batch.kept)
        ) is not None and oldest < version - self.max_staleness:
            raise CheckFailed(
                f"step {version} has tokens of version {oldest}, but max_staleness={self.max_staleness}"
            )
        digest = digest_samples(sample for group in batch.kept for sample in group.samples)
        return Rollout(tuple(batch.kept), tuple(batch.generated), batch.counts, digest)

    def trained(self, step: int, update: StepReport | None = None, *, by: str = "policy") -> None:
        batch = self._collected.pop(step)
        if self.ledger is not None:
            is_skipped = (
                update is not None
                and bool(update.updates)
                and all(one.skipped for one in update.updates)
            )
            outcomes = batch.outcomes("dropped/update_skipped" if is_skipped else "trained")
            self.ledger.settle(step, outcomes, by=by, oldest=oldest_version(batch.kept))

    def _advance(self, step: int, *, wait: bool = False) -> Batch:
        """Samples on, as far as rounds are done, or else waits for them."""
        batch, sampling, round_ = self._open[step]
        while round_ is not None and (wait or round_.is_done()):
            round_ = next(sampling, None)
            self._open[step] = batch, sampling, round_
        return batch

    def _sample(self, batch: Batch, prompts: Prompts, count: int, step: int) -> Sampling:
        counts, taken, kept = batch.counts, batch.taken, batch.kept
        limit = (1 + self.max_refills) * count
        while not taken or (len(kept) < (count if self.keep else 1) and len(taken) < limit):
            so_far = (
                len(kept) + prompts.kept.get(KEPT, 0.0),
                len(taken) + prompts.kept.get(ASKED, 0.0),
            )
            size = num_prompts(count - len(kept), *so_far) if self.keep else count
            if taken:  # at most as many again, and more each time
                counts["rollout/refills"] += 1
                size = min(max(size, 2 ** counts["rollout/refills"]), len(taken))
            asked = prompts.take(min(size, limit - len(taken)))
            taken += asked
            yield (round_ := self._begin(asked, step))
            samples = round_.result()
            self._note("complete", step, asked)
            groups = self._groups(asked, samples, counts)
            batch.generated += groups
            for group in groups:
                (kept if self.keep is None or self.keep(group) else batch.flat).append(group)
        if self.keep:
            for name, number in ((KEPT, len(kept)), (ASKED, len(taken))):
                prompts.kept[name] = prompts.kept.get(name, 0.0) / 2 + number
            if len(kept) >= count:
                batch.carried = taken[taken.index(kept[count - 1].prompt) + 1 :]
                prompts.put_back(batch.carried)
        counts["groups/surplus"], kept[count:] = max(len(kept) - count, 0), []
        if (
            not kept
        ):  # train on groups without spread: the KL and entropy terms still have gradients
            kept[:], batch.flat[:count] = batch.flat[:count], []
            counts["groups/kept_flat"] = len(kept)
        counts["groups/filtered"] = len(batch.flat)

    def _begin(self, prompts: Sequence[Prompt], step: int) -> Round:
        """Starts a round of every sample of these prompts."""
        indices = [(index, self.temperature) for index in range(self.samples_per_prompt)]
        if self.greedy_baseline:
            indices.append((self.samples_per_prompt, 0.0))
        requests = [
            Request(
                prompt,
                index,
                request_seed(self.run_seed, step, prompt.prompt_id, index),
                temperature,
            )
            for prompt in prompts
            for index, temperature in indices
        ]
        self._note("generating", step, prompts, version=self._version)
        if self.begin is not None:
            return self.begin(requests, version=self._version)
        return Synchronous(partial(self.generate, requests, version=self._version))

    def _note(self, event: str, step: int, prompts: Sequence[Prompt], **values: Any) -> None:
        if self.ledger is not None:
            self.ledger.note(event, step, [prompt.prompt_id for prompt in prompts], **values)

    def _count_empty(
        self, version: int, num_groups: int, counts: Counter[str], *, is_empty: bool
    ) -> None:
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

    def _groups(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], counts: Counter[str]
    ) -> list[Group]:
        """Drops samples without a reward, and groups without samples or baseline."""
        by_prompt: dict[int, list[Sample]] = {prompt.prompt_id: [] for prompt in prompts}
        for sample in samples:
            counts["rollout/prompt_tokens_computed"] += sample.prompt_tokens_computed
            by_prompt[sample.prompt_id].append(self.shape(sample) if self.shape else sample)
        usable = []
        for prompt in prompts:
            group = self._group(prompt, by_prompt[prompt.prompt_id])
            counts.update({"samples/dropped": sum(group.dropped.values())} | dict(group.dropped))
            counts.update(
                cause for sample in group.samples for cause in sample.extra.get("counted", ())
            )
            lacks_baseline = self.greedy_baseline and group.baseline is None
            counts["groups/no_baseline"] += lacks_baseline
            counts["groups/empty"] += not group.samples
            if group.samples and not lacks_baseline:
                usable.append(group)
        return usable

    def _group(self, prompt: Prompt, samples: Sequence[Sample]) -> Group:
        """The scored samples by index, and the greedy sample's reward."""
        dropped = Counter(
            str(s.extra.get("dropped", "reward/none")) for s in samples if s.reward is None
        )
        scored = sorted(
            (s for s in samples if s.reward is not None), key=lambda sample: sample.index
        )
        drawn = tuple(sample for sample in scored if sample.index < self.samples_per_prompt)
        baseline = scored[-1].reward if len(scored) > len(drawn) else None
        return Group(prompt, drawn, baseline, dict(dropped))
