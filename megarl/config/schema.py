"""The config: every setting with its type and default. Imports no torch.

Unknown keys are errors. Each section is defined in its own module, with its checks. The defaults
train with GRPO: clip 0.2 / 0.28, token-mean, no KL. Other modules read defaults from here.
"""

from pathlib import Path
from typing import Annotated

from megarl.config.algorithm import Algorithm, KlTerm
from megarl.config.checkpoint import Checkpoint
from megarl.config.dpo import Dpo
from megarl.config.iterative import Iterative, RewardModelUpdates
from megarl.config.launch import Launch, RunSection
from megarl.config.lora import Lora
from megarl.config.model import Create, Model, ParallelSizes
from megarl.config.moe import Moe
from megarl.config.other_models import Critic, FrozenModel
from megarl.config.precision import Precision
from megarl.config.reward_model import RewardModel
from megarl.config.rewards import Reward
from megarl.config.rollout import Rollout
from megarl.config.section import Section, one_of
from megarl.config.sft import Sft
from megarl.config.stages import STAGES, Stage
from megarl.config.sync import Checks, Sync
from megarl.config.task import AnswerPlace, Eval, EvalSet, Task
from megarl.config.telemetry import SampleFiles, Telemetry
from megarl.config.train import Train, Trainer

# parts of sections, which other modules also import from here
__all__ = [
    "AnswerPlace",
    "Create",
    "EvalSet",
    "KlTerm",
    "RewardModelUpdates",
    "SampleFiles",
]


class Config(Section):
    """The config of a run."""

    stage: Annotated[str, one_of(STAGES)] = "rl"
    """Training stage, a name in megarl.config.stages.STAGES."""
    run: RunSection = RunSection()
    """Name, folder and seed."""
    model: Model = Model()
    """Model to train."""
    checks: Checks = Checks()
    """Checks that stop a run if trainer and engine disagree."""
    task: Task = Task()
    """Problems to train on."""
    rewards: tuple[Reward, ...] = (Reward(name="accuracy"),)
    """Rewards of a sample, summed with their weights."""
    algorithm: Algorithm = Algorithm()
    """Objective of the policy."""
    critic: Critic = Critic()
    """Value model of advantage gae."""
    teacher: FrozenModel | None = None
    """Teacher model for algorithm.distill_coef."""
    reference: FrozenModel | None = None
    """Reference model of algorithm.kl; null: the policy before the first step."""
    parallel: ParallelSizes = ParallelSizes()
    """Parallel layout of the trainer."""
    rollout: Rollout = Rollout()
    """Engine and sampling."""
    train: Train = Train()
    """Steps, optimizer and memory of the trainer."""
    trainer: Trainer = Trainer()
    """Options passed through to Megatron-Core."""
    lora: Lora | None = None
    """Low-rank adapters; null: all weights are trained."""
    precision: Precision = Precision()
    """FP8 training."""
    sft: Sft = Sft()
    """Settings of the stage sft."""
    dpo: Dpo = Dpo()
    """Settings of the stages dpo and iterative_dpo."""
    sync: Sync = Sync()
    """Weight sync."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints, exports and resuming."""
    iterative: Iterative = Iterative()
    """Settings of the stage iterative_grpo."""
    launch: Launch = Launch()
    """Processes and topology."""
    moe: Moe = Moe()
    """Router losses."""
    eval: Eval = Eval()
    """Evaluation on held-out problems."""
    reward_model: RewardModel = RewardModel()
    """Settings of the stage reward_model."""
    telemetry: Telemetry = Telemetry()
    """Trackers and sample files."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.run.dir) / self.run.name

    @property
    def stage_spec(self) -> Stage:
        """The properties of the stage that the launcher and the checks need."""
        return STAGES[self.stage]
