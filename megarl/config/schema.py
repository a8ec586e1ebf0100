"""Every setting there is, typed and closed: an unknown key is an error. No torch here.

Defaults are those of ARCHITECTURE: GRPO, clip 0.2 / 0.28, token-mean, no KL.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from megarl.config.names import CLIPS
from megarl.layout import Parallel

__all__ = [
    "Algorithm", "Checkpoint", "Checks", "Config", "Create", "Eval", "KlTerm", "Launch", "Model", "Moe",
    "Overlong", "ParallelSizes", "Precision", "Reward", "Rollout", "RunSection", "Sft", "Sync", "Task", "Telemetry",
    "Train",
]  # fmt: skip


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)  # run.name=7 is a name


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = "runs"
    seed: int = Field(default=0, ge=0, lt=2**31)


class Create(Section):
    """A small random model, written once to <run.dir>/.models/<hash>."""

    family: Literal["qwen2", "qwen3", "qwen3_moe", "llama", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"] = "qwen3"
    layers: PositiveInt = 2
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt | None = None  # None: hidden / heads
    intermediate: PositiveInt | None = None  # None: 3 x hidden
    vocab: PositiveInt | None = None  # None: that of the tokenizer
    experts: int = Field(default=0, ge=0)
    experts_per_token: PositiveInt = 2
    moe_intermediate: PositiveInt | None = None  # None: hidden
    tied: bool = True
    max_position: PositiveInt = 4096
    tokenizer: Literal["characters", "none"] = "characters"
    phrases: tuple[str, ...] = ()  # texts that are one token each, beside the characters
    seed: int = 0


class Model(Section):
    path: str | None = None
    create: Create | None = None


class Checks(Section):
    max_logprob_diff: float | None = Field(default=None, gt=0)  # None: 1e-4 in fp32; 0.5 max and 0.02 mean in bf16
    probe: Literal["first", "always"] = "first"


class Task(Section):
    name: str = "reasoning_gym:chain_sum"
    options: dict[str, Any] = Field(default_factory=dict)  # handed to the task, as reasoning-gym's own settings
    template: Literal["chat", "plain"] | None = None  # None: chat where the tokenizer has one
    seed: int = 0
    size: PositiveInt | None = None  # None: all there is


class Reward(Section):
    name: str  # accuracy, format, code, judge, process; a URL; or a dotted path to a function of yours
    weight: float = Field(default=1.0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default_factory=dict)


class KlTerm(Section):
    """KL(policy || reference). The estimator not given: k1 in the reward, k3+ in the loss."""

    estimator: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3+"
    where: Literal["reward", "loss"] = "loss"
    coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    target: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # the coefficient follows; None: fixed
    horizon: PositiveInt = 10000  # samples over which it follows
    value_clamp: float | None = Field(default=None, gt=0)  # of the estimator's value; 10 is what several trainers do
    importance_weighted: bool = (
        False  # in the loss, weigh by pi / pi_old with its gradient (DeepSeek-V3.2, arXiv 2512.02556)
    )

    @model_validator(mode="before")
    @classmethod
    def _estimator_by_place(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("where") == "reward":
            return {"estimator": "k1"} | values
        return values


class Overlong(Section):
    """Less reward for what comes near rollout.max_tokens (DAPO, arXiv 2503.14476, 3.4)."""

    buffer: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # tokens before the limit; below 1: a share of it
    factor: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # what a response of max_tokens loses


class Algorithm(Section):
    """A preset is only a set of these values (megarl.config.presets) and prints as such."""

    preset: str = "grpo"
    advantage: str = "grpo"
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    loss: str = "ppo_clip"
    loss_options: dict[str, Any] = Field(default_factory=dict)
    token_selection_options: dict[str, Any] = Field(
        default_factory=dict
    )  # which tokens clip_cov and kl_cov treat apart
    clip_low: float | None = Field(default=None, ge=0)  # bounds of the loss; not given: the loss's own
    clip_high: float | None = Field(default=None, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)  # null: off
    aggregation: str = "token-mean"
    kl: KlTerm = KlTerm()
    correction: str = "none"
    correction_options: dict[str, Any] = Field(default_factory=dict)
    use_rollout_logprobs: bool = (
        False  # the engine's log-probs are the old ones, so the loss's ratio holds the whole gap
    )
    entropy_coef: float = Field(default=0.0, allow_inf_nan=False)
    filter_zero_std: bool = False  # groups of equal rewards give way to fresh prompts (DAPO's dynamic sampling)
    max_refills: int = Field(default=4, ge=0)  # rounds of fresh prompts a step; then it goes on with what there is
    overlong: Overlong = Overlong()
    truncated: Literal["train", "mask", "penalise"] = "train"  # responses cut at rollout.max_tokens
    truncated_reward: float = Field(default=0.0, allow_inf_nan=False)  # theirs when penalised, whatever the rewards say
    reward_clip: tuple[float, float] | None = None
    reward_clip_stage: Literal["raw", "normalised"] = "raw"
    normalise_rewards: bool = False  # by mean and deviation of all rewards seen, so of training so far

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_loss(cls, values: Any) -> Any:
        """What is not given is the loss's own, so that a config prints the bounds that act."""
        if not isinstance(values, dict):
            return values
        given = {k: v for k, v in values.items() if v is not None or k not in ("clip_low", "clip_high")}
        return CLIPS.get(str(values.get("loss", "ppo_clip")), {}) | given

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0


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
    expert: PositiveInt = 1  # of vLLM's expert parallelism, over data x tensor ranks of a replica; only planned so far
    replicas: PositiveInt | None = None  # split topology only; colocated: processes / ranks of a replica
    samples_per_prompt: PositiveInt = 8
    max_tokens: PositiveInt = 256  # of a response
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_staleness: int = Field(default=0, ge=0)
    max_model_len: PositiveInt | None = None  # None: longest prompt allowed + max_tokens
    max_prompt_tokens: PositiveInt = 1024
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    cpu_kv_cache_gb: float = Field(default=1.0, gt=0)
    enforce_eager: bool | None = None  # None: True on CPU
    sleep_level: Literal[0, 1, 2] = (
        0  # while training the engine's cache is freed, and its weights go to the host (1) or (2)
    )


class Train(Section):
    steps: int = Field(default=100, ge=0)
    prompts_per_step: PositiveInt = 32
    updates_per_step: PositiveInt = 1
    lr: float = Field(default=1.0e-6, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = Field(default=1.0, ge=0)  # 0: no clipping
    max_tokens_per_microbatch: PositiveInt = 16384
    dtype: Literal["fp32", "bf16"] = "bf16"
    logprob_chunk: PositiveInt = 1024  # tokens read at a time; their logits exist a tile of the vocabulary at a time
    recompute: Literal["none", "selective", "full"] = "none"  # activations made again in the backward pass
    recompute_modules: tuple[str, ...] = ("core_attn",)  # of selective: Megatron-Core's names, as mlp, moe, layernorm
    offload: tuple[Literal["gradients", "optimizer", "weights"], ...] = ()  # off the device while nothing trains
    optimizer_cpu_offload: bool = False  # Adam runs on the CPU beside the GPU (Megatron-Core's hybrid optimizer)


class Precision(Section):
    fp8: dict[str, Any] | None = None  # {recipe: blockwise | delayed | tensorwise | mxfp8, ...}


class Sft(Section):
    until_accuracy: float | None = Field(default=None, gt=0, lt=1)  # stop once the sampled accuracy reaches this


class Sync(Section):
    # what a rank receives waits in memory of its own (the device's if it has the room, else the host's) until all ranks
    # agree that all of it came as it was sent: so a torn sync leaves the engine its weights. False: no such memory, and
    # after a torn sync the engine refuses prompts
    atomic: bool = True
    # the most that a rank sends or receives in one round of the exchange, unless a single row is larger
    round_bytes: PositiveInt = 512 << 20


class Checkpoint(Section):
    every: int = Field(default=50, ge=0)  # steps; and at the end. 0: never
    keep: PositiveInt = 3
    asynchronous: bool = True  # written while the run goes on; the state is copied to host memory first
    resume: str = "auto"  # auto | never | a checkpoint's folder
    export_hf: Literal["never", "end"] | PositiveInt = (
        "never"  # also export a Hugging Face model: at the end, or every N steps
    )


class Launch(Section):
    topology: Literal["colocated", "split"] = "colocated"
    processes: PositiveInt | None = None  # the trainer's, in the split topology
    processes_per_node: PositiveInt | None = None  # null: as launched; 8 for `megarl plan`
    timeout_s: PositiveInt = 600  # of any collective


class Moe(Section):
    """Terms of the routers (megarl.trainer.moe), weighed like the policy loss; bias_update_rate does without a loss."""

    aux_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # coefficient of the balance of experts
    # per_sequence: within each row, so the same in every layout. megatron: over whole micro-batches, as Megatron-Core's
    # own, so its gradient depends on how rows are packed and on the number of data-parallel ranks
    aux_loss_type: Literal["per_sequence", "megatron"] = "per_sequence"
    z_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # coefficient of mean logsumexp(logits)^2
    bias_update_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of the bias DeepSeek-V3's routers have
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # allgather pads micro-batches to one length

    @property
    def acts(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0 or self.bias_update_rate > 0


class Eval(Section):
    every: int = Field(default=0, ge=0)  # 0: never
    size: PositiveInt = 256
    temperature: float = Field(default=0.0, ge=0)


class Telemetry(Section):
    tensorboard: bool = False
    wandb: str | None = None


class Config(Section):
    stage: Literal["rl", "sft"] = "rl"
    run: RunSection = RunSection()
    model: Model = Model()
    checks: Checks = Checks()
    task: Task = Task()
    rewards: tuple[Reward, ...] = (Reward(name="accuracy"),)
    algorithm: Algorithm = Algorithm()
    parallel: ParallelSizes = ParallelSizes()
    rollout: Rollout = Rollout()
    train: Train = Train()
    precision: Precision = Precision()
    sft: Sft = Sft()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    launch: Launch = Launch()
    moe: Moe = Moe()
    eval: Eval = Eval()
    telemetry: Telemetry = Telemetry()
