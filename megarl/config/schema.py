"""Every setting, with its type; an unknown key is an error. Imports no torch.

The defaults train with GRPO: clip 0.2 / 0.28, token-mean, no KL. A default that another module needs is read from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.names import CLIPS, LOSS_BOUNDS
from megarl.config.section import (
    Dpo,
    Fp8,
    Iterative,
    Lora,
    Options,
    Reward,
    RewardModel,
    Section,
    Sft,
)
from megarl.layout import Parallel

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
AnswerPlace = Literal["auto", "tag", "boxed", "last_line", "last_number", "whole"]


class RunSection(Section):
    name: str = Field(default="run", pattern=NAME, max_length=200)  # names a folder
    dir: str = "runs"
    seed: int = Field(default=0, ge=0, lt=2**31)


class Create(Section):
    """A small random model, written once to <run.dir>/.models/<hash>."""

    family: str = "qwen3"  # a name in megarl.models.registry.FAMILIES
    layers: PositiveInt = 2
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt | None = None  # None: hidden / heads
    intermediate: PositiveInt | None = None  # None: 3 x hidden
    vocab: PositiveInt | None = None  # None: the tokenizer's
    experts: NonNegativeInt = 0
    experts_per_token: PositiveInt = 2
    moe_intermediate: PositiveInt | None = None  # None: hidden
    tied: bool = True
    max_position: PositiveInt = 4096
    tokenizer: Literal["characters", "none"] = "characters"
    phrases: tuple[str, ...] = ()  # texts that are one token each, in addition to the characters
    seed: int = 0


class Model(Section):
    path: str | None = None  # a Hugging Face model: its folder, or its id on the hub
    revision: str | None = (
        None  # branch, tag or commit of a hub id; None: main. A run records the commit
    )
    create: Create | None = None
    trust_remote_code: bool = (
        False  # run the Python code of its tokenizer; the model itself is always megarl's
    )


class Checks(Section):
    # between trainer and engine, of any token, in nats; None: by more than rounding explains, measured for the model
    max_logprob_diff: PositiveFloat | None = None
    probe: Literal["first", "always"] = "first"


class MixturePart(Section):
    name: str  # as task.name
    options: Options = {}
    weight: PositiveFloat = 1.0  # share of the prompts, relative to the other parts


class Task(Section):
    name: str = "reasoning_gym:chain_sum"  # or jsonl:FILE, hf:DATASET, package.module:function (megarl.data.tasks)
    options: Options = {}  # passed to the task, for example reasoning-gym's settings
    mixture: tuple[
        MixturePart, ...
    ] = ()  # several tasks, interleaved by weight; instead of name and options
    template: Literal["chat", "plain"] | None = None  # None: chat if the tokenizer has one
    # the system message, unless a problem's messages have one; it names the place where `answer` is looked for: tag:
    # between <answer> and </answer>; boxed: within \\boxed{}; last_line: alone on it; last_number: at the end; whole
    system_prompt: str | None = Field(default=None, min_length=1)
    template_args: Options = {}  # variables of the chat template, for example {enable_thinking: false}
    # the part of a response, after any thinking, that `accuracy` judges; auto: tag or boxed if present, else whole
    answer: AnswerPlace = "auto"
    seed: int = 0
    size: PositiveInt | None = None  # None: the whole task


class KlTerm(Section):
    """KL(policy || reference). The default estimator is k1 in the reward and k3+ in the loss."""

    against: Literal["reference", "old"] = (
        "reference"  # old: the policy before a batch's updates (arXiv 1707.06347, 4)
    )
    estimator: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3+"
    where: Literal["reward", "loss"] = "loss"
    coef: NonNegativeFloat = 0.0
    target: float | None = Field(default=None, gt=0)  # adapt the coefficient; None: fixed
    horizon: PositiveInt = 10000  # samples over which the coefficient adapts
    value_clamp: PositiveFloat | None = (
        None  # bound of the estimator's value; several trainers use 10
    )
    importance_weighted: bool = (
        False  # weigh KL in the loss by pi / pi_old (DeepSeek-V3.2, arXiv 2512.02556)
    )

    @model_validator(mode="before")
    @classmethod
    def _estimator_by_place(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("where") == "reward":
            return {"estimator": "k1"} | values
        return values


class Overlong(Section):
    """Penalty for responses close to rollout.max_tokens (DAPO, arXiv 2503.14476, section 3.4)."""

    buffer: NonNegativeFloat = 0.0  # tokens below the limit; under 1: a fraction of it
    factor: NonNegativeFloat = 1.0  # penalty for a response of max_tokens tokens


class FrozenModel(Section):
    """A model with the policy's tokenizer that scores its samples: on the same devices in turn, or behind a URL."""

    model: str | None = None  # folder or hub id (id@revision) of a Hugging Face model
    url: str | None = (
        None  # of a server that returns prompt_logprobs, such as vLLM: http://host:8000/v1
    )
    served_name: str | None = None  # of the model, in requests to the server; None: its only one
    options: Options = {}  # of the requests (megarl.rewards.remote.HttpOptions): timeout_s, concurrency ...


class Algorithm(Section):
    """What is optimized. A preset (megarl.config.presets) is a set of these values; printed configs show them."""

    preset: str = "grpo"
    advantage: str = "grpo"
    advantage_options: Options = {}
    loss: str = "ppo_clip"
    loss_options: Options = {}
    token_selection_options: Options = {}  # of the losses clip_cov and kl_cov
    clip_low: NonNegativeFloat | None = None  # None: the loss's own default
    clip_high: NonNegativeFloat | None = None
    dual_clip: float | None = Field(default=None, gt=1)  # null: off
    aggregation: str = "token-mean"
    kl: KlTerm = KlTerm()
    distill_coef: NonNegativeFloat = (
        0.0  # of KL(policy || teacher), in each token's advantage, or with
    )
    distill_top_k: NonNegativeInt = (
        0  # in the loss, over that many of the teacher's likeliest tokens and all others
    )
    distill_beta: float = Field(
        default=1.0, ge=0, le=1
    )  # of that loss; 0: KL(teacher || policy), between: JSD
    correction: str = "none"
    correction_options: Options = {}
    use_rollout_logprobs: bool = (
        False  # as old log-probs, so that the loss's ratio covers the mismatch with the engine
    )
    entropy_coef: float = 0.0
    filter_zero_std: bool = (
        False  # replace groups of equal rewards with fresh prompts (DAPO's dynamic sampling)
    )
    max_refills: NonNegativeInt = 4  # batches of fresh prompts; then the step has fewer groups
    overlong: Overlong = Overlong()
    truncated: Literal["train", "mask", "penalise"] = "train"  # responses cut at rollout.max_tokens
    truncated_reward: float = 0.0  # replaces the reward of penalised responses
    reward_clip: tuple[float, float] | None = None
    reward_clip_stage: Literal["raw", "normalised"] = "raw"
    normalise_rewards: bool = (
        False  # by the mean and std of all rewards since the start of training
    )

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_loss(cls, values: Any) -> Any:
        """Fills in the loss's own bounds, so that a printed config shows them. dual_clip: null means off."""
        if not isinstance(values, dict):
            return values
        explicit = {
            k: v
            for k, v in values.items()
            if v is not None or k not in LOSS_BOUNDS or k == "dual_clip"
        }
        return CLIPS.get(str(values.get("loss", "ppo_clip")), {}) | explicit

    @property
    def loss_bounds(self) -> dict[str, float | None]:
        """The loss's arguments among clip_low, clip_high and dual_clip."""
        return {name: getattr(self, name) for name in CLIPS.get(self.loss, {})}

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0 and self.kl.against == "reference"

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"


class Critic(Section):
    """The value model of advantage gae. What is not set here, such as schedule and clip_grad, is as in `train`."""

    model: str | None = (
        None  # folder or hub id (id@revision) to start from, as of a reward model; None: the policy's
    )
    lr: NonNegativeFloat = (
        9.0e-6  # of REINFORCE++'s experiments (arXiv 2501.03262), with 5e-7 for the policy
    )
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = (
        0  # first steps, in which only the critic is updated; the policy's schedule goes on
    )
    clip: PositiveFloat | None = (
        0.2  # of the change of a value in a step's updates (VALUE_LOSSES); null: off
    )
    # lambda of its targets (VAPO, arXiv 2504.05118: 1, with 0.95 for the advantage); None: as the advantage's
    lam: float | None = Field(default=None, ge=0, le=1)
    bootstrap_truncated: bool = (
        False  # the remaining reward of a response cut by length is the value after it, not 0
    )


class ParallelSizes(Section):
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1

    @property
    def sizes(self) -> Parallel:
        return Parallel(**self.model_dump())


class Rollout(Section):
    tensor: PositiveInt = 1
    expert: PositiveInt = 1  # vLLM's expert parallelism, over the data x tensor ranks of a replica; `megarl plan` only
    replicas: PositiveInt | None = (
        None  # split topology only; colocated: processes / ranks per replica
    )
    samples_per_prompt: PositiveInt = 8
    max_tokens: PositiveInt = 256  # of a response
    stop: tuple[
        str, ...
    ] = ()  # texts of one token each that end a response, like EOS, and stay in it
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_staleness: NonNegativeInt = (
        0  # split topology: how many versions a trained token may be behind
    )
    update_in_flight: bool = (
        True  # at a staleness above 0, weights change within responses; False: between them
    )
    max_model_len: PositiveInt | None = None  # None: max_prompt_tokens + max_tokens
    max_prompt_tokens: PositiveInt = 1024
    gpu_memory_utilization: float = Field(
        default=0.6, gt=0, lt=1
    )  # of the GPU, with what train.offload leaves there
    cpu_kv_cache_gb: PositiveFloat = 1.0
    enforce_eager: bool | None = None  # None: True on CPU
    # while training: 0 keeps the engine on the GPU, 1 frees its cache and moves its weights to the host, 2 frees both
    sleep_level: Literal[0, 1, 2] = 0
    quantization: Literal["none", "fp8"] = (
        "none"  # fp8: the engine's linear layers, a scale per 128 x 128 weights
    )
    # whose choice of experts the trainer replays: the engine's, or that of its own forward pass before the updates
    router_replay: Literal["none", "engine", "trainer"] = "none"
    engine_options: Options = {}  # for vLLM's EngineArgs (megarl.config.library_options)


class Train(Section):
    steps: NonNegativeInt = 100
    prompts_per_step: PositiveInt = 32
    updates_per_step: PositiveInt = 1  # optimizer steps in one pass over a batch
    epochs_per_batch: PositiveInt = (
        1  # passes over a batch; from the second on, its prompts are shuffled among updates
    )
    lr: NonNegativeFloat = 1.0e-6
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: NonNegativeFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # 0: no clipping
    max_tokens_per_microbatch: PositiveInt = 16384
    dtype: Literal["fp32", "bf16"] = "bf16"
    logprob_chunk: PositiveInt = 1024  # tokens per chunk of the log-prob computation
    entropy_every: NonNegativeInt = (
        1  # steps between measurements of `entropy`, if no loss needs it; 0: never
    )
    recompute: Literal["none", "selective", "full"] = "none"  # of activations, in the backward pass
    recompute_modules: tuple[str, ...] = (
        "core_attn",
    )  # for selective: Megatron-Core's names (mlp, moe, layernorm...)
    offload: tuple[
        Literal["gradients", "optimizer", "weights"], ...
    ] = ()  # to the host while the engine samples
    optimizer_cpu_offload: bool = False  # run Adam on the CPU (Megatron-Core's hybrid optimizer)


class Trainer(Section):
    megatron_options: Options = {}  # for Megatron-Core's config dataclasses (megarl.config.library_options)


class Precision(Section):
    fp8: Fp8 | None = None


class Sync(Section):
    # stage received weights (on the device while it has room, else on the host) until all ranks' checksums match, so
    # that a failed sync leaves the engine's weights intact; False saves memory: the engine then refuses prompts
    atomic: bool = True
    round_bytes: PositiveInt = 512 << 20  # a rank sends and receives at most this much in one round


class Checkpoint(Section):
    every: NonNegativeInt = 50  # steps, and at the end; 0: never
    keep: PositiveInt = 3
    asynchronous: bool = True  # write in the background, from a copy in host memory
    resume: str = "auto"  # auto | never | the folder of a checkpoint
    export_hf: Literal["never", "end"] | PositiveInt = (
        "never"  # a Hugging Face model; N: every N steps and at the end
    )
    # bf16: the weights as trained (in train.dtype); same: rounded to the block format of model.path, if it has one
    export_format: Literal["bf16", "same"] = "bf16"


class FallbackLayout(Section):
    processes: PositiveInt  # of the trainer
    parallel: ParallelSizes = ParallelSizes()


class Launch(Section):
    topology: Literal["colocated", "split"] = "colocated"
    processes: PositiveInt | None = None  # of the trainer, in the split topology
    processes_per_node: PositiveInt | None = (
        None  # None: LOCAL_WORLD_SIZE in a run; 8 in a plan of more than 8
    )
    timeout_s: PositiveInt = (
        600  # of collectives; of a silent rank 0.9 of it, of one that is stopped or stuck half
    )
    # split: how often, in all, a lost engine is started again, or the trainer from its last checkpoint; then exit 3
    max_restarts: NonNegativeInt = 3
    # split: what takes the place of `processes` and `parallel` when a node is gone: the first that has room
    fallback_layouts: tuple[FallbackLayout, ...] = ()
    dashboard: bool = False  # split: Ray's, on this machine's loopback


class Moe(Section):
    """Router losses (megarl.trainer.moe), weighted like the policy loss, and the loss-free bias update."""

    aux_loss: NonNegativeFloat = 0.0  # coefficient of the load-balancing loss
    # per_sequence: over each row, the same in every layout; megatron: over micro-batches, so it depends on packing
    aux_loss_type: Literal["per_sequence", "megatron"] = "per_sequence"
    z_loss: NonNegativeFloat = 0.0  # coefficient of mean logsumexp(logits)^2
    bias_update_rate: NonNegativeFloat = 0.0  # of the expert bias of DeepSeek-V3's routers
    dispatcher: Literal["alltoall", "allgather"] = (
        "alltoall"  # allgather pads micro-batches to equal length
    )

    @property
    def changes_router(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0 or self.bias_update_rate > 0


class EvalSet(Section):
    """More problems to evaluate on. Stored problems (jsonl:, hf:) are then never trained on."""

    name: str = Field(pattern=NAME)  # of its metrics: <name>/mean@4
    task: str | None = None  # as task.name, all its problems; None: the held-out problems of `task`
    options: Options = {}
    size: PositiveInt = 256  # problems, at most
    samples: PositiveInt = 1  # of each problem
    temperature: NonNegativeFloat | None = None  # None: rollout.temperature


class Eval(Section):
    every: NonNegativeInt = 0  # 0: never
    size: NonNegativeInt = 256  # held-out problems of `task`, at most; 0: only those of `sets`
    temperature: NonNegativeFloat = 0.0
    sets: tuple[EvalSet, ...] = ()  # in addition to the held-out problems of `task`


class SampleFiles(Section):
    """The best, the worst and random samples of a step, in rollouts/step_<n>.jsonl."""

    every: NonNegativeInt = 1  # steps from one file to the next; 0: never
    max_samples: PositiveInt = 64  # in a file
    keep: PositiveInt = 100  # the newest files


class Telemetry(Section):
    tensorboard: bool = False  # write event files to the run directory
    # A Weights & Biases project; null: off. Mode, entity and folder come from WANDB_MODE, WANDB_ENTITY and WANDB_DIR
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:]{1,128}$")
    rollouts: SampleFiles = SampleFiles()


class Config(Section):
    # each is megarl/launch/run_<stage>.py
    stage: Literal[
        "rl", "sft", "reward_model", "dpo", "iterative_grpo", "iterative_dpo", "best_of_n"
    ] = "rl"
    run: RunSection = RunSection()
    model: Model = Model()
    checks: Checks = Checks()
    task: Task = Task()
    rewards: tuple[Reward, ...] = (Reward(name="accuracy"),)
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    teacher: FrozenModel | None = None  # of algorithm.distill_coef
    reference: FrozenModel | None = None  # of algorithm.kl; None: the policy before the first step
    parallel: ParallelSizes = ParallelSizes()
    rollout: Rollout = Rollout()
    train: Train = Train()
    trainer: Trainer = Trainer()
    lora: Lora | None = None  # None: all weights are trained
    precision: Precision = Precision()
    sft: Sft = Sft()
    dpo: Dpo = Dpo()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    iterative: Iterative = Iterative()
    launch: Launch = Launch()
    moe: Moe = Moe()
    eval: Eval = Eval()
    reward_model: RewardModel = RewardModel()
    telemetry: Telemetry = Telemetry()
