"""Section `rollout`: the engine and its sampling parameters, and its checks."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import Config, Options, Section, refuse
from megarl.models.shape import ModelShape

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32's CPU attention
CPU_LATENT = (512, 64)  # (kv_lora_rank, qk_rope_head_dim): the only sizes of its CPU MLA kernel


class Rollout(Section):
    """Engine replicas and sampling."""

    tensor: PositiveInt = 1
    """Tensor-parallel size of an engine replica."""
    data: PositiveInt = 1
    """Data-parallel size of an engine replica: groups of `tensor` ranks that sample different
    prompts and share the experts. Only for models with experts; others take more replicas."""
    expert: PositiveInt = 1
    """Expert-parallel size of an engine replica: 1, or tensor x data."""
    replicas: PositiveInt | None = None
    """Number of engine replicas, only in the split topology, where null means 1; colocated:
    processes / ranks per replica."""
    samples_per_prompt: PositiveInt = 8
    """Number of responses to a prompt; they form a group."""
    max_tokens: PositiveInt = 256
    """Maximum length of a response, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts of one token each that end a response like EOS, and remain part of the response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; values other than 1 only in evaluation."""
    top_k: int = -1
    """Number of likeliest tokens to sample from; values other than -1 (all) only in evaluation."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability relative to the likeliest token; values other than 0 only in
    evaluation."""
    max_staleness: NonNegativeInt = 0
    """Split topology: maximum number of policy versions between the sampling of a token and the
    training on it."""
    update_in_flight: bool = True
    """Updates the engine's weights within responses if max_staleness is above 0; false: only
    between responses."""
    max_model_len: PositiveInt | None = None
    """Maximum sequence length of the engine, in tokens; null: max_prompt_tokens + max_tokens."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt, in tokens; longer prompts are skipped."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    """Fraction of GPU memory for the engine, including what train.offload leaves on the GPU."""
    cpu_kv_cache_gb: PositiveFloat = 1.0
    """Size of the KV cache of a rank on a CPU, in GB."""
    enforce_eager: bool | None = None
    """Runs the engine without CUDA graphs and compilation; null: only on a CPU."""
    sleep_level: Literal[0, 1, 2] = 0
    """State of the engine during training: 0 keeps it on the GPU, 1 frees the KV cache and offloads
    the weights to the host, 2 frees both."""
    quantization: Literal["none", "fp8"] = "none"
    """Format of the engine's linear layers; fp8: one scale per block of 128 x 128 weights."""
    router_replay: Literal["none", "engine", "trainer"] = "none"
    """Expert choices that the trainer replays: the engine's, or those of the trainer's own forward
    pass before the updates."""
    engine_options: Options = {}
    """Fields of vLLM's EngineArgs (megarl.config.library_options)."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of an engine replica."""
        return self.tensor * self.data

    @property
    def ranks_per_sampler(self) -> int:
        """Number of ranks of a replica that sample the same prompts, together."""
        return self.tensor

    @property
    def layout(self) -> str:
        """The parallel sizes of an engine replica, as Megatron names them: "tp2 dp4 ep8"."""
        sizes = {"tp": self.tensor, "dp": self.data, "ep": self.expert}
        return " ".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1 or axis == "tp")


def check_engine_layout(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for parallel sizes of an engine replica that vLLM does not have."""
    rollout = config.rollout
    ranks = rollout.ranks_per_replica
    sizes = f"rollout.tensor x data = {rollout.tensor} x {rollout.data} = {ranks}"
    refuse(
        (
            rollout.data > 1 and not shape.is_moe,
            f"rollout.data={rollout.data}, but the model ({shape.family}) has no experts that data "
            "ranks could share; set it to 1, for a replica of rollout.tensor ranks each",
        ),
        (
            rollout.expert not in (1, ranks),
            f"rollout.expert={rollout.expert} is neither 1 nor {sizes}: vLLM distributes experts "
            f"over all ranks of a replica; set rollout.expert={ranks}, or change tensor or data",
        ),
        (
            rollout.data > 1 and rollout.expert == 1,
            f"rollout.data={rollout.data} needs experts that the data ranks share; set "
            f"rollout.expert={ranks}, or rollout.data=1 for a replica of rollout.tensor ranks each",
        ),
    )


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for sizes that vLLM's CPU kernels would reject, but only when they run."""
    sizes = {}
    if shape.is_moe:
        sizes["hidden"] = shape.hidden
    if shape.is_moe and shape.swiglu_limit:  # without a limit, vLLM pads this size
        engine = config.rollout.tensor if config.rollout.expert == 1 else 1
        sizes[f"moe_intermediate / {engine}"] = shape.moe_intermediate // engine
    for name, size in sizes.items():
        if size % 32:
            raise ValueError(
                f"{name} = {size} is not a multiple of 32, as vLLM needs on a CPU; change it or "
                "use a GPU"
            )
    latent = shape.latent
    if latent is None:
        if shape.head_dim not in CPU_HEAD_DIMS:
            known = ", ".join(map(str, CPU_HEAD_DIMS))
            raise ValueError(
                f"head_dim={shape.head_dim}, but vLLM's attention on CPU supports {known}; "
                "choose a model with one of them (model.create.head_dim), or run on a GPU"
            )
    elif (latent.kv_lora_rank, latent.qk_rope_head_dim) != CPU_LATENT:
        raise ValueError(
            f"kv_lora_rank={latent.kv_lora_rank}, qk_rope_head_dim={latent.qk_rope_head_dim}, but "
            f"vLLM's MLA on a CPU supports only {CPU_LATENT[0]} and {CPU_LATENT[1]}; "
            "choose these, or run on a GPU"
        )


def check_sampling(config: Config) -> None:
    """Raises ValueError for top_p, top_k or min_p, which training does not account for."""
    for key, off in (("top_p", (1.0,)), ("top_k", (-1, 0)), ("min_p", (0.0,))):
        value = getattr(config.rollout, key)
        if value not in off:
            raise ValueError(
                f"rollout.{key}={value} is not supported in training: its log-probs are over all "
                f"tokens; set {off[0]}"
            )


def check_lengths(config: Config, shape: ModelShape) -> None:
    """Raises ValueError if rows can exceed the maximum length of the engine or the model."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    sums = (
        f"rollout.max_prompt_tokens + max_tokens = {rollout.max_prompt_tokens} + "
        f"{rollout.max_tokens} = {longest}"
    )
    limit = rollout.max_model_len
    if limit is not None and longest > limit:
        raise ValueError(
            f"{sums} exceeds rollout.max_model_len={limit}; lower one or raise the limit"
        )
    if (limit or longest) > shape.max_position:
        size = f"rollout.max_model_len={limit}" if limit else sums
        raise ValueError(f"{size} exceeds the model's max_position={shape.max_position}; lower it")


def check_routing(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError if router_replay is set but routes cannot be recorded or replayed."""
    mode = config.rollout.router_replay
    if mode == "none":
        return
    chosen = shape.experts_per_token
    updates = config.train.updates_per_step * config.train.epochs_per_batch
    setting = f"rollout.router_replay={mode}"
    if config.launch.is_split:
        raise ValueError(
            f"{setting} is not available with launch.topology=split; leave it at none, or set "
            "launch.topology=colocated"
        )
    refuse(
        (not shape.is_moe, f"but the model ({shape.family}) has no experts; set it to none"),
        (shape.bridge, f"which {shape.family} on Megatron-Bridge does not support; set it to none"),
        (chosen == 1, f"but experts_per_token={chosen}; it needs 2 or more, set it to none"),
        (
            not config.stage_spec.needs_engine or config.stage_spec.compares,
            f"but stage={config.stage} has no policy gradient on samples; set it to none",
        ),
        (
            config.trainer.megatron_options.get("moe_router_fusion", False),
            "but trainer.megatron_options.moe_router_fusion=true replays nothing; remove that",
        ),
        (
            mode == "engine" and config.rollout.enforce_eager is False and not gpus,
            "but with rollout.enforce_eager=false nothing is captured on a CPU; remove that",
        ),
        (
            mode == "trainer" and updates == 1,
            "which has no effect with one update per batch, that records its own routes; raise "
            "train.updates_per_step or epochs_per_batch, or use engine",
        ),
        start=f"{setting}, ",
    )
