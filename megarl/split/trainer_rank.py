"""A Megatron rank of the split topology.

The controller calls each method on all ranks, in the same order:

controller --batch--> score, update --> rank 0's result; the parity gate runs in update
           --version--> transfer --> engine workers (rollout/vllm/async_engine.py)
           --step, states--> maybe_save: the same checkpoints as in the colocated topology
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from megarl.config.schema import Config
from megarl.parity.gate import Measured, ParityChecks, measure_logprobs
from megarl.platform.env import Env
from megarl.processes.exit_codes import CurrentPhase
from megarl.rollout.vllm.async_engine import SyncGroup
from megarl.run.checkpoints import export, make_checkpoints
from megarl.run.context import open_rank
from megarl.run.models import check_weights, make_learner, make_objective, make_trainer
from megarl.types import (
    ObjectiveState,
    PublishReport,
    ScoredBatch,
    StepReport,
    TokenBatch,
    TokenScores,
    TrainBatch,
)
from megarl.weights.sync.from_config import engine_weights, make_publisher
from megarl.weights.sync.publish import Publisher, WeightSender
from megarl.weights.sync.transports.collective import open_store


@dataclass
class StoredState:
    """Implements roles.Stateful for the state of the controller's prompts."""

    values: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


class TrainerRank:
    """The methods that the controller calls through a proxy; it receives rank 0's values."""

    publisher: Publisher  # set by `join`

    def __init__(self, config: Config, env: Env, store: str, name: str) -> None:
        """Builds the rank. A collective: ranks rendezvous in `store`, under the prefix `name`."""
        self.phase = CurrentPhase()
        self._stack = ExitStack()
        meeting = open_store(store, name, timedelta(seconds=config.launch.timeout_s))
        rank = self.rank = self._stack.enter_context(open_rank(config, env, self.phase, meeting))
        self.trainer = make_trainer(rank)
        objective = make_objective(config)
        self.prompts = StoredState()
        self.learner = make_learner(rank, self.trainer, objective)
        state = objective.initial_state()
        self.checkpoint = make_checkpoints(rank, self.trainer, self.prompts, state, self.learner)
        self.checks = ParityChecks(
            rank.transport,
            partial(measure_logprobs, self.trainer),
            max_diff=config.checks.max_logprob_diff,
            is_moe=rank.shape.is_moe,
            version=lambda: self.version,
        )
        self.group = None  # transport of the weight sync
        self.version = -1  # version of the last committed sync

    def restore(self) -> tuple[int, ObjectiveState, dict[str, Any]]:
        """Restores the checkpoint; returns (steps done, objective's state, prompts' state)."""
        start, state = self.checkpoint.restore(self.rank.config.checkpoint.resume)
        for trained in self.learner.trainers:
            check_weights(self.rank, trained)
        return start, state, self.prompts.state()

    def score(self, batch: TrainBatch) -> TokenScores:
        self.phase.name = "train"
        return self.learner.score(batch)

    def update(self, batch: ScoredBatch) -> StepReport:
        return self.learner.update(batch, gate=self.checks.parity)

    def measure(self, batch: TokenBatch) -> Measured:
        """Computes the trainer's log-probs for the probe, and sets the gate's rounding floor."""
        measured = measure_logprobs(self.trainer, batch)
        self.checks.floor = self.rank.transport.gather(measured.of_policy)[0]
        return measured

    def join(self, group: Mapping[str, Any]) -> None:
        """Joins the process group of all trainer ranks and engine workers. A collective."""
        self.phase.name = "sync"
        self._leave()
        is_cuda = self.rank.device.type == "cuda"
        config, fleet, self.group = SyncGroup(**group).join(self.rank.env.rank, is_cuda=is_cuda)
        self.publisher = make_publisher(
            config,
            self.rank.shape,
            fleet,
            self.group,
            WeightSender(self.trainer.tensors.slices, self.trainer.merged_parameters),
            None,
            is_cuda=is_cuda,
            weights=engine_weights(config, self.rank.shape, self.trainer.tensors.shapes),
        )

    def transfer(self, version: int) -> bool:
        """Sends a version (see Publisher.transfer); returns True if the probe must run."""
        self.phase.name = "sync"
        return self.publisher.transfer(version)

    def end(self, version: int, committed: bool) -> PublishReport | None:
        if committed:
            self.version = version
            return self.publisher.commit(version)
        self.publisher.abort()
        return None

    def maybe_save(
        self, step: int, state: ObjectiveState, prompts: Mapping[str, Any], last: bool
    ) -> None:
        self.phase.name = "save"
        self.prompts.restore(prompts)
        self.checkpoint.maybe_save(step, state, last=last)

    def save(self) -> None:
        self.checkpoint.save()

    def finish(self) -> None:
        self.checkpoint.finish()

    def export(self) -> None:
        export(self.rank, self.trainer)

    def close(self) -> None:
        self._leave()
        self._stack.close()

    def _leave(self) -> None:
        if self.group:
            self.group.leave()
