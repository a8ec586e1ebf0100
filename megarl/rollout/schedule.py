"""Decides which requests to sample, and which samples form groups.

    prompts --requests--> generate --scored samples--> shape_reward --> groups --> Rollout
       ^---------------------- refill, if groups without spread are filtered --'

Every round asks for as many prompts as will probably fill the batch, by the share of groups that
were kept in this and the last steps. The first `count` kept groups of the stream are trained on,
and the stream goes on after the last of them. So the batch depends on samples alone: not on time,
layout, or how many were asked for.

With `max_staleness` k, the batches of the next k steps are sampled while the trainer works:

    trainer  |------ step v ------|------ step v+1 ------|-- ...
    k = 0    v v v |              |v+1 v+1 v+1 |         |v+2
    k = 1    v v v v v v v v v v v|v+1 v+1 v+1 v+1 v+1 v+1|v+2

A batch is begun k versions before its own step, so no token can be older. The trainer waits for the
slowest prompt of its batch: none is discarded. The batch has the same prompts at every k. Nothing
here knows time or engines: `generate` samples and scores at once, `begin_round` while others work.
Every rank returns the same groups.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

from megarl.algorithms import objective
from megarl.config.schema import Algorithm
from megarl.data.collate import collate
from megarl.data.ledger import Ledger
from megarl.roles import Prompts
from megarl.rollout.sampling import request_seed
from megarl.types import CheckFailed, Group, Prompt, Request, Rollout, Sample, StepReport

DEFAULTS = Algorithm()
MAX_EMPTY_STEPS = 3  # consecutive ones
# running counts in Prompts.kept; each step halves the earlier ones
KEPT = "groups/kept"
ASKED = "groups/asked"
# generate(requests, version=) -> scored samples, the same on every rank
Generate = Callable[..., list[Sample]]


def has_spread(group: Group, algorithm: Algorithm = DEFAULTS) -> bool:
    """Returns if the rewards that `algorithm` compares differ within the group; else its advantages
    are zero.
    """
    batch = collate([group], temperature=1.0, mask_truncated=algorithm.truncated == "mask")
    return objective.has_spread(batch, algorithm)


def digest_samples(samples: Iterable[Sample]) -> str:
    """Returns the sha256 over prompt id, sample index and tokens of every sample, in order."""
    hashed = hashlib.sha256()
    for sample in samples:
        hashed.update(f"{sample.prompt_id} {sample.index} {sample.tokens.tolist()}\n".encode())
    return hashed.hexdigest()


def oldest_version(groups: Iterable[Group]) -> int | None:
    """Returns the oldest version of the weights that sampled a token of these groups."""
    versions = []
    for group in groups:
        for sample in group.samples:
            versions += sample.versions[sample.trainable].unique().tolist()
    return min(versions, default=None)


def num_prompts(missing: int, kept: float, asked: float) -> int:
    """Returns how many prompts to request for `missing` groups, if `kept` of `asked` were so far.

    One standard deviation above the mean, so that five times in six no further round is needed.
    """
    share = min(max(kept, 1.0) / asked, 1.0) if asked else 1.0
    return math.ceil((missing + math.sqrt(missing * (1 - share))) / share)


class Round(Protocol):
    """Requests that are being sampled and scored."""

    def is_done(self) -> bool: ...
    def result(self) -> list[Sample]:
        """Waits for the slowest; returns the same samples on every rank, by prompt and index."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """A round whose samples are generated when they are needed."""

    result: Callable[[], list[Sample]]

    def is_done(self) -> bool:
        return False


@dataclass
class Batch:
    """The groups of a step, as far as they are sampled."""

    taken: list[Prompt] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)  # to train on
    flat: list[Group] = field(default_factory=list)  # filtered out
    carried: list[Prompt] = field(default_factory=list)  # put back into the stream
    generated: list[Group] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter({"rollout/refills": 0}))

    def close(self, count: int) -> None:
        """Leaves the first `count` groups to train on.

        If there are none, groups without spread are trained on: the KL and entropy terms still have
        gradients.
        """
        self.counts["groups/surplus"] = max(len(self.kept) - count, 0)
        self.kept[count:] = []
        if not self.kept:
            self.kept[:] = self.flat[:count]
            self.flat[:count] = []
            self.counts["groups/kept_flat"] = len(self.kept)
        self.counts["groups/filtered"] = len(self.flat)

    def outcomes(self, trained: str) -> dict[str, list[int]]:
        """Returns the ids of prompts that are not carried over, by the ledger's outcomes."""
        kept = _ids(group.prompt for group in self.kept)
        flat = _ids(group.prompt for group in self.flat)
        used = _ids(prompt for prompt in self.taken if prompt not in self.carried)
        return {
            trained: kept,
            "filtered/no_spread": [number for number in used if number in flat],
            "dropped/not_scored": [number for number in used if number not in kept + flat],
        }


def _ids(prompts: Iterable[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in prompts]


# fills a batch; resumed when the round that it yielded is done
Sampling = Generator[Round, None, None]


@dataclass
class Rollouts:
    """roles.Rollouts."""

    generate: Generate
    samples_per_prompt: int
    temperature: float
    run_seed: int
    filter_zero_std: bool = False  # groups without spread are replaced by fresh prompts
    # at most this many times `count` fresh prompts per step
    max_refills: int = DEFAULTS.max_refills
    has_spread: Callable[[Group], bool] = has_spread
    shape_reward: Callable[[Sample], Sample] = lambda sample: sample
    # adds a greedy sample per prompt, whose reward is the group's baseline (ReMax)
    greedy_baseline: bool = False
    # number of empty steps in a row; None: no step has had a group yet
    empty_steps: int | None = None
    max_staleness: int = 0
    # begin_round(requests, version=): samples while others train; None: `generate`
    begin_round: Callable[..., Round] | None = None
    last_step: float = math.inf  # no batch is sampled for this one, or after it
    ledger: Ledger | None = None
    # step -> its batch, how it continues, and the round that is open
    _open: dict[int, tuple[Batch, Sampling, Round | None]] = field(default_factory=dict, init=False)
    _collected: dict[int, Batch] = field(
        default_factory=dict, init=False
    )  # step -> a batch not trained on yet
    _version: int = field(default=-1, init=False)  # the version of the weights that sample now
    _first_drop: str = field(default="", init=False)  # why a sample of the step was dropped

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout:
        """Returns `count` groups, or fewer after `max_refills`, each with a scored sample.

        Called for one step after the other, with the weights of that version. The batches of the
        next `max_staleness` steps are begun too. `Rollout.counts` counts, by cause, dropped samples
        and groups, and scored samples whose reward names a cause. A step without groups is empty
        and changes nothing.

        Raises ValueError if no step has had a group yet, CheckFailed after MAX_EMPTY_STEPS empty
        steps in a row, or if a token is older than `max_staleness` allows.
        """
        self._version = version
        for step in range(version, version + self.max_staleness + 1):
            if step not in self._open and (step < self.last_step or step == version):
                batch = Batch()
                sampling = self._sample(batch, prompts, count, step)
                self._open[step] = batch, sampling, next(sampling)
        batch = self._advance(version, wait=True)
        prompts.observe(batch.generated)
        self._collected[version] = batch
        del self._open[version]
        for step in self._open:  # a batch that needs more prompts asks before the trainer trains
            self._advance(step)
        self._count_empty(version, (1 + self.max_refills) * count, batch)
        oldest = oldest_version(batch.kept)
        if oldest is not None and oldest < version - self.max_staleness:
            raise CheckFailed(
                f"step {version} has tokens of version {oldest}, "
                f"but max_staleness={self.max_staleness}"
            )
        digest = digest_samples(chain.from_iterable(group.samples for group in batch.kept))
        return Rollout(tuple(batch.kept), tuple(batch.generated), batch.counts, digest)

    def trained(self, step: int, update: StepReport | None = None, *, by: str = "policy") -> None:
        batch = self._collected.pop(step)
        if not self.ledger:
            return
        outcome = "trained"
        if update and update.updates and all(one.skipped for one in update.updates):
            outcome = "dropped/update_skipped"
        outcomes = batch.outcomes(outcome)
        self.ledger.settle(step, outcomes, by=by, oldest=oldest_version(batch.kept))

    def _advance(self, step: int, *, wait: bool = False) -> Batch:
        """Continues a batch as far as its rounds are done; with `wait`, to its end."""
        batch, sampling, round_ = self._open[step]
        while round_ and (wait or round_.is_done()):
            round_ = next(sampling, None)
            self._open[step] = batch, sampling, round_
        return batch

    def _sample(self, batch: Batch, prompts: Prompts, count: int, step: int) -> Sampling:
        """Fills a batch, round by round; goes on after a `yield` when that round is done."""
        limit = (1 + self.max_refills) * count
        needed = count if self.filter_zero_std else 1
        while not batch.taken or (len(batch.kept) < needed and len(batch.taken) < limit):
            size = self._round_size(batch, prompts, count)
            asked = prompts.take(min(size, limit - len(batch.taken)))
            batch.taken += asked
            round_ = self._begin(asked, step)
            yield round_
            samples = round_.result()
            if self.ledger:
                self.ledger.note("complete", step, _ids(asked))
            self._add_groups(batch, self._groups(asked, samples, batch.counts))
        if self.filter_zero_std:
            self._carry_over(batch, prompts, count)
        batch.close(count)

    def _round_size(self, batch: Batch, prompts: Prompts, count: int) -> int:
        """Returns for how many prompts to ask: as many as will probably fill the batch."""
        size = count
        if self.filter_zero_std:
            kept = len(batch.kept) + prompts.kept.get(KEPT, 0.0)
            asked = len(batch.taken) + prompts.kept.get(ASKED, 0.0)
            size = num_prompts(count - len(batch.kept), kept, asked)
        if not batch.taken:
            return size
        batch.counts["rollout/refills"] += 1  # at most as many again, and more each time
        return min(max(size, 2 ** batch.counts["rollout/refills"]), len(batch.taken))

    def _add_groups(self, batch: Batch, groups: Sequence[Group]) -> None:
        batch.generated += groups
        for group in groups:
            is_flat = not self.has_spread(group)
            batch.counts["groups/flat"] += is_flat
            (batch.flat if self.filter_zero_std and is_flat else batch.kept).append(group)

    def _carry_over(self, batch: Batch, prompts: Prompts, count: int) -> None:
        """Remembers the share of kept groups, and puts back the prompts after the last one."""
        taken = batch.taken
        kept = batch.kept
        for name, number in ((KEPT, len(kept)), (ASKED, len(taken))):
            prompts.kept[name] = prompts.kept.get(name, 0.0) / 2 + number
        if len(kept) >= count:
            batch.carried = taken[taken.index(kept[count - 1].prompt) + 1 :]
            prompts.put_back(batch.carried)

    def _begin(self, prompts: Sequence[Prompt], step: int) -> Round:
        """Starts a round of every sample of these prompts."""
        temperatures = [self.temperature] * self.samples_per_prompt
        if self.greedy_baseline:
            temperatures.append(0.0)
        requests = []
        for prompt in prompts:
            for index, temperature in enumerate(temperatures):
                seed = request_seed(self.run_seed, step, prompt.prompt_id, index)
                requests.append(Request(prompt, index, seed, temperature))
        if self.ledger:
            self.ledger.note("generating", step, _ids(prompts), version=self._version)
        if self.begin_round:
            return self.begin_round(requests, version=self._version)
        return Synchronous(partial(self.generate, requests, version=self._version))

    def _count_empty(self, version: int, num_groups: int, batch: Batch) -> None:
        if batch.kept:
            self.empty_steps = 0
            return
        message = (
            f"step {version}: none of {num_groups} groups can be trained on "
            f"({self._first_drop or dict(batch.counts)}); check the rewards"
        )
        self._first_drop = ""
        batch.counts["rollout/empty"] = 1
        if self.empty_steps is None:
            raise ValueError(message)
        self.empty_steps += 1
        if self.empty_steps >= MAX_EMPTY_STEPS:
            raise CheckFailed(f"{message}; this is empty step {self.empty_steps} in a row")

    def _groups(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        counts: Counter[str],
    ) -> list[Group]:
        """Drops samples without a reward, and groups without samples or baseline."""
        by_prompt = {prompt.prompt_id: [] for prompt in prompts}
        for sample in samples:
            counts["rollout/prompt_tokens_computed"] += sample.prompt_tokens_computed
            by_prompt[sample.prompt_id].append(self.shape_reward(sample))
        usable = []
        for prompt in prompts:
            group = self._group(prompt, by_prompt[prompt.prompt_id], counts)
            for sample in group.samples:
                counts.update(sample.extra.get("counted", ()))
            lacks_baseline = self.greedy_baseline and group.baseline is None
            counts["groups/no_baseline"] += lacks_baseline
            counts["groups/empty"] += not group.samples
            if group.samples and not lacks_baseline:
                usable.append(group)
        return usable

    def _group(self, prompt: Prompt, samples: Sequence[Sample], counts: Counter[str]) -> Group:
        """Returns the scored samples by index, with the greedy sample's reward as baseline; counts
        the others by cause.
        """
        scored = []
        for sample in sorted(samples, key=lambda sample: sample.index):
            if sample.reward is None:
                cause = str(sample.extra.get("dropped", "reward/none"))
                counts[cause] += 1
                detail = sample.extra.get("detail")
                if detail and not self._first_drop:
                    self._first_drop = f"{cause}: {detail}"
            else:
                scored.append(sample)
        counts["samples/dropped"] += len(samples) - len(scored)
        drawn = tuple(sample for sample in scored if sample.index < self.samples_per_prompt)
        baseline = scored[-1].reward if len(scored) > len(drawn) else None
        return Group(prompt, drawn, baseline)
