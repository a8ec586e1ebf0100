"""Sections `model` and `parallel`: the policy and its parallel layout, and their checks."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megarl.config.section import Config, Section, refuse
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape


class Create(Section):
    """A small random model, written to <run.dir>/.models/<hash> unless it exists there."""

    family: str = "qwen3"
    """Model family, a name in megarl.models.registry.FAMILIES."""
    layers: PositiveInt = 2
    """Number of decoder layers."""
    hidden: PositiveInt = 128
    """Hidden size."""
    heads: PositiveInt = 4
    """Number of attention heads."""
    kv_heads: PositiveInt = 2
    """Number of key-value heads."""
    head_dim: PositiveInt | None = None
    """Size of a head; null: hidden / heads."""
    intermediate: PositiveInt | None = None
    """Hidden size of the MLP; null: 3 x hidden."""
    vocab: PositiveInt | None = None
    """Size of the vocabulary; null: the tokenizer's."""
    experts: NonNegativeInt = 0
    """Number of experts per layer; 0 for dense families."""
    experts_per_token: PositiveInt = 2
    """Number of experts that a token is routed to."""
    moe_intermediate: PositiveInt | None = None
    """Hidden size of an expert; null: hidden."""
    tied: bool = True
    """Ties the weights of embedding and output head."""
    max_position: PositiveInt = 4096
    """Maximum sequence length, in tokens."""
    tokenizer: Literal["characters", "none"] = "characters"
    """Tokenizer: one token per character, or none."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token each, in addition to single characters."""
    seed: int = 0
    """Seed of the weights."""


class Model(Section):
    """The model to train."""

    path: str | None = None
    """Hugging Face model: its folder, or its hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null: main. A run records the commit."""
    create: Create | None = None
    """Random model to create, instead of `path`."""
    trust_remote_code: bool = False
    """Allows Python code of the model's tokenizer to run; the model code is always megarl's."""


class ParallelSizes(Section):
    """Parallel sizes of the trainer. The data-parallel size is the world size divided by them."""

    tensor: PositiveInt = 1
    """Tensor-parallel size; sequence parallelism has the same size."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size (number of stages)."""
    virtual_pipeline: PositiveInt = 1
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    context: PositiveInt = 1
    """Context-parallel size; the tokens of a sequence are divided among these ranks."""
    expert: PositiveInt = 1
    """Expert-parallel size."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of experts."""
    layers: tuple[PositiveInt, ...] | None = None
    """Number of decoder layers of each pipeline chunk in model order, pipeline x virtual_pipeline
    numbers; null: distributed evenly. Fewer on the first and last stage make room for the embedding
    and the head."""

    @property
    def sizes(self) -> Parallel:
        return Parallel(**self.model_dump(exclude={"layers"}), layers=self.layers or ())


def check_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError if a size of the model is not divisible by the parallel sizes of the
    trainer or engine.
    """
    sizes = config.parallel
    virtual = sizes.virtual_pipeline
    engine = config.rollout.tensor
    for axis, ranks in (("parallel.tensor", sizes.tensor), ("rollout.tensor", engine)):
        check_divides("heads", shape.heads, axis, ranks)
        check_divides("shared experts' intermediate", shape.shared_intermediate, axis, ranks)
        if not all(kind.has_experts for kind in shape.layer_kinds):
            check_divides("intermediate", shape.intermediate, axis, ranks)
    check_divides("kv_heads", shape.kv_heads, "parallel.tensor", sizes.tensor)
    refuse(
        # vLLM can replicate key-value heads
        (
            shape.kv_heads % engine and engine % shape.kv_heads,
            f"rollout.tensor={engine} is neither a divisor nor a multiple of "
            f"kv_heads={shape.kv_heads}; choose one that is",
        ),
        (
            virtual > 1 and sizes.pipeline == 1,
            f"parallel.virtual_pipeline={virtual} needs pipelining; set it to 1, or pipeline to 2 "
            "or more",
        ),
    )
    stages = Parallel(pipeline=sizes.pipeline, virtual_pipeline=virtual, layers=sizes.sizes.layers)
    stage_layers(shape.layers, Layout.of(stages, sizes.pipeline, 0))  # raises for wrong numbers
    if shape.is_moe:
        _check_experts(config, shape)
        return
    experts = {
        "parallel.expert": sizes.expert,
        "parallel.expert_tensor": sizes.expert_tensor,
        "rollout.expert": config.rollout.expert,
    }
    for key, size in experts.items():
        if size > 1:
            raise ValueError(
                f"{key}={size}, but the model ({shape.family}) has no experts; set it to 1"
            )


def _check_experts(config: Config, shape: ModelShape) -> None:
    sizes = config.parallel
    tensor = config.rollout.tensor
    expert = config.rollout.expert
    width = shape.moe_intermediate
    check_divides("experts", shape.experts, "parallel.expert", sizes.expert)
    check_divides("moe_intermediate", width, "parallel.expert_tensor", sizes.expert_tensor)
    if expert == 1:
        check_divides("moe_intermediate", width, "rollout.tensor", tensor)
    check_divides("experts", shape.experts, "rollout.expert", expert)
    router = shape.router
    chosen = shape.experts_per_token
    refuse(
        (
            chosen > shape.experts
            or router.groups_per_token > router.groups
            or shape.experts % router.groups,
            f"num_experts_per_tok={chosen}, topk_group={router.groups_per_token} and "
            f"n_group={router.groups} do not fit {shape.experts} experts; correct config.json",
        ),
        # each tensor-parallel rank would add the bias before the all-reduce
        (
            shape.out_bias and sizes.expert_tensor > 1,
            f"parallel.expert_tensor={sizes.expert_tensor}, but the experts of {shape.family} have "
            "biases, which Megatron-Core supports only with 1; set it to 1, and use "
            "parallel.expert",
        ),
        (
            router.score_function == "sigmoid" and not router.norm_topk_prob and chosen > 1,
            "norm_topk_prob=false with a sigmoid router is not supported by Megatron-Core; "
            "set it to true",
        ),
        (
            router.groups > 1 and chosen != 2 * router.groups_per_token,
            f"num_experts_per_tok={chosen}, topk_group={router.groups_per_token}, "
            f"n_group={router.groups}: Megatron-Core scores a group by its best "
            "num_experts_per_tok / topk_group experts, but the model by its best 2; "
            "num_experts_per_tok must be 2 * topk_group",
        ),
    )


def check_divides(name: str, size: int, by: str, count: int) -> None:
    """Raises ValueError, listing the divisors of `size`, if `count` is not one."""
    if size % count == 0:
        return
    divisors = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise ValueError(
        f"{name}={size} is not divisible by {by}={count}; choose {by} from {', '.join(divisors)}"
    )


def read_and_check(config: Config, key: str, name: str) -> ModelShape:
    """Reads the shape of another model, `name`, which the setting `key` refers to.

    Raises ValueError if there is no such model, or if it does not fit the policy's layout.
    """
    folder = model_folder(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{key}={name} is not a folder with a config.json; set it to that, or the hub id, "
            "of a model"
        )
    other = read_model(folder)
    check_model(config, other)
    return other
