"""The sizes of a decoder-only transformer of any family, and a family as a record of functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.models.config_json import ConfigReader
    from megarl.models.shards import LayerSpec, Table

Shape = tuple[int, ...]  # of a tensor
ShapesByName = dict[str, Shape]  # by name of the tensor
Settings = dict[str, Any]  # of a config.json, or of Megatron's TransformerConfig


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention, which first projects queries and key-values down.
    Names are Hugging Face's."""

    q_lora_rank: int  # 0: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int  # part of query and key without RoPE
    qk_rope_head_dim: int  # part with RoPE; all heads share the key's
    v_head_dim: int


@dataclass(frozen=True)
class Router:
    """How tokens are routed to experts."""

    score_function: str = "softmax"  # or sigmoid
    norm_topk_prob: bool = True  # the weights of the chosen experts add up to one
    expert_bias: bool = False  # an fp32 bias per expert, added to the scores for selection only
    linear_bias: bool = False  # a bias of the router's linear layer
    groups: int = 1  # groups of experts; a token first selects groups_per_token of them
    groups_per_token: int = 1
    scale: float = 1.0  # factor of the routed experts' output


@dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer, for which its family's table has rules."""

    name: str  # for errors
    has_experts: bool = False
    # tokens attend to earlier tokens, so ranks can split rows and rows can share a prefix
    is_attention: bool = True


DENSE = LayerKind("dense")
EXPERTS = LayerKind("experts", has_experts=True)


@dataclass(frozen=True)
class ModelShape:
    """The values of a `config.json`, with Hugging Face's meaning. For a family without a table,
    only the sizes are set."""

    family: str  # `model_type`
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rms_eps: float
    rope_theta: float
    max_position: int
    qkv_bias: bool = False
    qk_norm: bool = False
    # {}, or the keys of llama3's or yarn's scaling
    rope_scaling: Settings = field(default_factory=dict)
    rotary_fraction: float = 1.0  # the part of head_dim with RoPE
    out_bias: bool = False  # bias of o_proj
    sinks: bool = False  # a learned logit per head in the attention softmax
    sliding_window: int = 0  # in tokens, for layers 0, 2, 4, ...; 0: none
    latent: LatentSizes | None = None
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0  # of all shared experts together
    # kinds of the first layers; the last one is also that of all further layers. Empty: all alike
    kinds: tuple[LayerKind, ...] = ()
    router: Router = Router()
    swiglu_limit: float = 0.0  # of gpt-oss's clamped SwiGLU; 0: not clamped
    mtp_layers: int = 0  # layers of multi-token prediction, stored after the last layer
    eos: tuple[int, ...] = ()
    # folder of a model without a table, which Megatron-Bridge builds and converts
    bridge: Path | None = None

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def layer_kinds(self) -> list[LayerKind]:
        return [*map(self.kind, range(self.layers))]

    def kind(self, layer: int) -> LayerKind:
        """Returns the kind of a global layer. Multi-token prediction follows the last layer."""
        kinds = self.kinds or (EXPERTS if self.is_moe else DENSE,)
        return kinds[min(layer, len(kinds) - 1)]


@dataclass(frozen=True)
class Family:
    """One `model_type`: functions that take and return plain data. CONTRIBUTING.md shows how to add
    a family."""

    architecture: str  # the class in transformers; empty: there is none, hence no random models
    # reads config.json; raises ValueError for settings that transformers or vLLM implement and
    # megarl does not
    read: Callable[["ConfigReader"], ModelShape]
    # returns the table of Megatron's parameters, for a padded vocabulary
    table: Callable[[ModelShape, "LayerSpec", int], "Table"]
    # returns TransformerConfig settings that do not follow from the shape; `activation_func` is a
    # name
    megatron: Callable[[ModelShape], Settings] = lambda shape: {}
    # edits the table derived for vLLM
    engine: Callable[[ModelShape, "Table"], "Table"] = lambda shape, table: table
    is_moe: bool = False
    # returns the family's keys of a random model's config.json, from the common keys, and the
    # number and width of experts
    random_config: Callable[[Settings, int, int], Settings] = lambda values, experts, width: {}
