"""The roles that the loop uses.

A backend is any implementation; the loop never depends on a particular one.

In colocated mode every rank runs the loop, calls every method in the same order, and gets the same
result (SPMD):

    rank 0    collect ----------> score, update ------> publish ----> next step
                 |  all-gather       |  collectives        |  P2P
    rank r    collect ----------> score, update ------> publish ----> next step

    collect   waits for the slowest replica: every rank receives all samples, scored
    update    waits for the slowest data rank: gradients and the decision to skip are all-reduced
    publish   waits until every rank has verified what it received

Decisions to stop or skip depend only on all-reduced values. An exception is broadcast, so that no
peer waits for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from megarl.types import (
    Group,
    ObjectiveState,
    Prompt,
    PublishReport,
    Request,
    Rollout,
    Sample,
    SampleKey,
    ScoredBatch,
    StepReport,
    TokenScores,
    TrainBatch,
)

Values = Mapping[str, Any]  # by name
SpanContext = Callable[[str], AbstractContextManager[Any]]  # times what is done in it, by a name


class Stateful(Protocol):
    """Plain data that checkpoints save and restore."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Values) -> None: ...


class Prompts(Stateful, Protocol):
    """A resumable stream of prompts, the same on every rank; their ids rise."""

    @property
    def kept(self) -> dict[str, float]:
        """Numbers that are saved with the position."""
        ...

    def take(self, count: int) -> list[Prompt]: ...
    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """`take` returns these, the last that were taken, again."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Sees all scored groups of a batch, once; the same on every rank. What later prompts
        depend on is part of the state. By default ignores them.
        """


class Sampler(Protocol):
    """Samples from the policy.

    Colocated: the engine replica of this rank, which works while `poll` is called. All its ranks
    call `poll` equally often, all with a time-out or all without; what the first one submits and
    aborts reaches the others there.
    Split: all replicas, which work on their own.

    A request is known by its prompt's id and its index, and no two of one pair run at a time. Each
    comes back once, by `poll` or by `abort`.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Returns at once. Raises CheckFailed without verified weights, ValueError if a prompt is
        too long or a request is running already.
        """

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        """Returns the samples finished since the last call; waits for one, at most `timeout_s`, if
        any are running.

        Raises CheckFailed if no replica is left, Terminated after SIGTERM.
        """
        ...

    def abort(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Aborts these requests; returns the unfinished samples with their tokens so far.

        Raises ValueError if one is not running.
        """
        ...

    def running(self) -> int:
        """Returns how many have not come back."""
        ...


class Engine(Sampler, Protocol):
    """The engine replica of this rank, in the colocated topology."""

    receiver: Any  # a WeightReceiver (weights/sync/publish.py)
    before_step: Callable[[], None]
    bytes_asleep: int  # not on the device, although torch counts them as allocated

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its response together."""
        ...

    @property
    def is_asleep(self) -> bool: ...
    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        """Returns each prompt with `max_tokens` more tokens, [L], sampled at temperature 1 past any
        end token, under the latest weights, committed or not.
        """
        ...

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """Returns the log-probs of each row's tokens but the first, at temperature 1, under the
        latest weights, committed or not.
        """
        ...

    def finish(self) -> None:
        """Returns when no data rank of the replica has requests: they step together, so one that
        has its samples makes empty steps. Every rank calls it before it submits again.
        """

    def sleep(self) -> None: ...
    def wake(self, part: str) -> None:
        """Restores the memory of the "weights" before a sync, of the "kv_cache" before sampling."""


class Scoring(Protocol):
    """Scores the samples of a rollout: slow rewards start with `add`, and `results`
    waits for them.
    """

    def add(self, samples: Sequence[Sample]) -> None: ...
    def results(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns these samples scored, in this order, whether or not they were added before."""
        ...


class Rewards(Protocol):
    """Scores samples.

    A sample that cannot be scored has reward None; CheckFailed: none can, as a server is gone.
    """

    def start(self, prompts: Sequence[Prompt]) -> Scoring: ...


class Rollouts(Protocol):
    """Generates, scores, filters and refills groups of samples; returns the same groups on every
    rank.
    """

    def collect(self, prompts: Prompts, count: int, *, version: int) -> Rollout: ...
    def trained(self, step: int, update: StepReport | None = None, *, by: str = "policy") -> None:
        """The groups that were collected for this step are used up: no later step or resumed run
        samples them.
        """


# Called once a batch, before the first optimizer step: returns metrics, or raises CheckFailed to
# refuse the update, as trainer and engine disagree.
Gate = Callable[[ScoredBatch], Mapping[str, float]]


class Learner(Protocol):
    """The models that are trained."""

    def score(self, batch: TrainBatch) -> TokenScores:
        """Returns what the objective needs before the update."""
        ...

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        """Makes the updates of one batch; if the gate refuses it, nothing changes."""
        ...


class Weights(Protocol):
    """Moves the trainer's weights into the engine, verified."""

    def publish(self, *, version: int) -> PublishReport: ...


class Phases(Protocol):
    """Contexts that decide which part of the job owns the device.

    On CPU and in split mode they are only timed.
    """

    def rollout(self) -> AbstractContextManager[None]: ...
    def train(self) -> AbstractContextManager[None]: ...
    def save(self) -> AbstractContextManager[None]: ...
    def sync(self) -> AbstractContextManager[None]: ...


class Checkpoint(Protocol):
    """`maybe_save` saves after `step` rollout batches, when a save is due; `last` marks the last
    step.

    `save` saves the last boundary now, `finish` waits until it is written. `hold` is called before
    a stage changes what is saved otherwise than by a step: the last boundary could not be saved
    later.
    """

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None: ...
    def save(self) -> None: ...
    def finish(self) -> None: ...
    def hold(self) -> None: ...


class Evaluation(Protocol):
    """Measures the policy on held-out problems after `step` steps, when an evaluation is due."""

    def maybe_run(self, step: int) -> Values | None: ...


class Record(Protocol):
    """Writes the metrics and samples of one step from what its roles returned."""

    def __call__(
        self,
        rollout: Rollout | None,
        update: StepReport,
        sync: PublishReport | None,
        scored: ScoredBatch | None = None,
    ) -> None: ...


class Telemetry(Protocol):
    """Writes one line of metrics per step, shows a progress bar, and passes metrics
    on to trackers.
    """

    def step(self, step: int) -> AbstractContextManager[Record]: ...
    def span(self, name: str) -> AbstractContextManager[None]: ...
    def evaluated(self, step: int, results: Values) -> None:
        """Takes the results of an evaluation after `step` steps; by default ignores them."""

    def add(self, metrics: Values) -> None:
        """Adds metrics of the current step; by default ignores them."""
