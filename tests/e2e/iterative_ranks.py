"""One rank, one engine: iterative GRPO that ends in the middle of each phase, and goes on; a reward model in the loop.

python iterative_ranks.py FOLDER     results go to FOLDER/results.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reward_score_ranks import save_classifier, transformers_scores

from megarl.commands.random_model import materialize_model
from megarl.commands.reward_server import SampleToScore, score_rows
from megarl.config.load import load_config
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.engine import make_engine
from megarl.run.models import RewardModel, make_reward_model
from megarl.stages.iterative_grpo import Iterations, RewardModelTraining
from megarl.stages.reward_model import Rankings
from megarl.stages.rl import train_policy
from megarl.trainer.actor_critic import policy_of
from megarl.trainer.learner import PolicyLearner
from megarl.types import CheckFailed

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "train.steps=4", "train.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens=8",
    "iterative.iterations=2", "iterative.reward_model.prompts=4", "iterative.reward_model.updates=2",
    "checkpoint.every=1", "checkpoint.asynchronous=false", "eval.every=2", "eval.size=2",
]  # fmt: skip
CREATE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 67}


class Killed(BaseException):
    """As if the process had been killed here: nothing is saved."""


PHASES: dict[
    str, tuple[Any, str, int, type[BaseException]]
] = {  # where, which call of it is the last
    "sampling": (RewardModelTraining, "sample", 2, Killed),
    "reset": (Iterations, "reset", 2, Killed),
    "reward_model": (Rankings, "update", 4, Killed),
    "refused": (Rankings, "update", 4, CheckFailed),
    "first_reward_model": (Rankings, "update", 2, Killed),
    "policy": (PolicyLearner, "update", 4, Killed),
}


@contextmanager
def watched(owner: Any, name: str, look: Callable[..., None]) -> Iterator[None]:
    """`look` is called with the arguments of each call, after it."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        look(*args)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


class Recorded(Iterations):
    @property
    def policy(self) -> PolicyLearner:
        return policy_of(self.learner)

    def bits(self) -> str:
        """A hash of all that an iteration leaves behind."""
        digest = sha256(json.dumps(self.history.state()).encode())
        for trainer in (self.policy.trainer, self.reward_model.trainer):
            trainer.memory.onload_all()
            states = [state for part in parts(trainer) for state in part.optimizer.state.values()]
            tensors = [*trainer.parameters_by_name().values()]
            tensors += [torch.as_tensor(state[name]) for state in states for name in sorted(state)]
            for tensor in tensors:
                digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
            digest.update(str(trainer.scheduler.step).encode())
        digest.update(weights(self.policy, of_reference=True).encode())
        return digest.hexdigest()


def parts(trainer: Any) -> list[Any]:
    return getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])


def weights(learner: PolicyLearner, *, of_reference: bool) -> str:
    def of_policy() -> str:
        tensors = learner.trainer.parameters_by_name()
        return sha256(b"".join(x.detach().numpy().tobytes() for x in tensors.values())).hexdigest()

    if not of_reference:
        return of_policy()
    with learner.reference.in_use():
        return of_policy()


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder, self.env, self.engines = folder, Env.read(), list[Engine]()
        self.device = pick_device(self.env.local_rank)

    def start(self, rank: RankContext) -> Engine:
        self.engines.extend([] if self.engines else [make_engine(rank)])
        return self.engines[0]

    def rank(self, name: str, *overrides: str) -> RankContext:
        values = [f"run.dir={self.folder}", f"run.name={name}", *SMALL, *overrides]
        config = materialize_model(
            load_config(ROOT / "examples/iterative_grpo/iterative_grpo.yaml", values)
        )
        return RankContext.of(config, self.env, self.device)

    def iterative(self, name: str) -> str:
        rank = self.rank(name)
        iterations = Recorded(rank)
        train_policy(rank, self.start, loop=iterations.loop, further=iterations.further)
        return iterations.bits()

    def whole(self) -> dict[str, Any]:
        """Also what was trained on, and the weights after each reset."""
        batches, resets = [], []

        def reset(iterations: Recorded) -> None:
            iterations.policy.trainer.memory.onload_weights()
            resets.append(
                [weights(iterations.policy, of_reference=value) for value in (True, False)]
            )
            iterations.policy.trainer.memory.offload_all()

        def update(_model: Rankings, batch: Any) -> None:
            rows = batch.tokens.split(batch.cu_seqlens.diff().tolist())
            batches.append(
                [
                    (group, row.tolist())
                    for group, row in zip(batch.group.tolist(), rows, strict=True)
                ]
            )

        with watched(Rankings, "update", update), watched(Iterations, "reset", reset):
            bits = self.iterative("whole")
        return {
            "bits": bits,
            "batches": batches,
            "resets": resets,
            "metrics": self.metrics("whole"),
        }

    def stopped(self, phase: str) -> dict[str, Any]:
        """A run that ends in this phase, and is started again."""
        owner, name, last, error = PHASES[phase]
        calls = []

        def end(*_: Any) -> None:
            calls.append(0)
            if len(calls) == last:
                raise error("here")

        try:
            with watched(owner, name, end):
                self.iterative(phase)
        except (Killed, CheckFailed):
            saved = sorted(
                path.name for path in (self.folder / phase / "checkpoints").glob("step_*")
            )
            return {"saved": saved, "bits": self.iterative(phase), "metrics": self.metrics(phase)}
        raise AssertionError(phase)

    def metrics(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / file).read_text().splitlines()]

    def scored(self) -> dict[str, Any]:
        """The reward of each sample of a step, that of transformers, and that of a server."""
        folder = save_classifier(self.folder / "classifier", heads=4)
        rewards = f"rewards=[{{name: model, weight: 2.0, options: {{path: {folder}}}}}]"
        rank = self.rank(
            "scored", "stage=rl", "train.steps=1", "checkpoint.every=0", "eval.every=0", rewards
        )
        train_policy(rank, self.start)
        rows = self.metrics("scored", "rollouts/step_000000.jsonl")
        trainer = make_trainer_alone(rank)
        asked = [
            {"id": str(n)} | {key: row[key] for key in ("prompt", "response", "finish")}
            for n, row in enumerate(rows)
        ]
        for row in asked:
            if row["finish"] == "stop":  # a text of ids has the end token, which a server would add
                row["tokens"] = token_ids(row)
        trainer.trainer.memory.onload_weights()
        served = [SampleToScore.model_validate(row) for row in asked]
        entries = score_rows(trainer.reward, rank.tokenizer, rank.shape.vocab, served)
        return {
            "loop": [row["reward"] / 2 for row in rows],
            "server": [entry["score"] / 2 for entry in entries],
            "transformers": transformers_scores(folder, [token_ids(row) for row in asked]),
            "metrics": self.metrics("scored"),
        }


def make_trainer_alone(rank: RankContext) -> RewardModel:
    from megarl.run.models import make_trainer

    reward_model = make_reward_model(rank, make_trainer(rank))
    assert reward_model is not None
    return reward_model


def token_ids(row: dict[str, Any]) -> list[int]:
    return [*map(int, row["prompt"].split()), *map(int, row["response"].split())]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    runs = Runs(folder)
    results: dict[str, Any] = {"whole": runs.whole()}
    results |= {
        "stopped": {phase: runs.stopped(phase) for phase in PHASES},
        "scored": runs.scored(),
    }
    (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
