"""Maps each `model_type` to its family, and a model to its shape and table.

A family is one file and one line in MODULES; Megatron-Bridge, if installed, builds any other
`model_type`."""

from importlib import import_module
from itertools import product
from pathlib import Path

from megarl.models.config_json import ConfigReader, read_config, read_latent, read_sizes
from megarl.models.formats import CONFIG_KEY
from megarl.models.headers import header_shapes
from megarl.models.lora import CONFIG
from megarl.models.shape import Family, ModelShape, Settings, ShapesByName
from megarl.models.shards import LayerSpec, Table, shapes_of
from megarl.platform.env import is_installed

MODULES = """
    llama
    qwen2
    qwen3
    qwen3_moe
    mixtral
    deepseek_v3
    glm4_moe
    gpt_oss
"""
MAX_EXPERTS = 200_000  # layers x experts: the names of their tensors fit in memory
FAMILIES: dict[str, Family] = {}
for _module in MODULES.split():
    FAMILIES |= import_module(f"megarl.models.{_module}").FAMILIES


def read_model(path: str | Path) -> ModelShape:
    """Reads `path`/config.json. Raises FileNotFoundError or ValueError with the offending values
    and a remedy."""
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        problem = "has no config.json" if folder.is_dir() else "is not a directory"
        raise FileNotFoundError(
            f"model.path={path} {problem}; set it to the folder of a Hugging Face model, or a hub "
            f"id; a checkpoint becomes such a folder with `megarl convert {path} OUT --to hf`"
        )
    if (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has a config.json and an {CONFIG}: transformers would add the adapter to "
            "the model, vLLM would not; move the adapter to a folder of its own, for lora.path"
        )
    return parse_model(read_config(file).raw, str(file), folder)


def parse_model(raw: Settings, where: str, folder: Path | None = None) -> ModelShape:
    """Returns the shape of a parsed config.json. `where` is its name in errors. A family without a
    table needs the `folder`. Raises ValueError if the config is not supported."""
    config = ConfigReader(raw, where)
    if config.family in FAMILIES:
        shape = FAMILIES[config.family].read(config)
    else:
        shape = _read_bridged(config, folder)
    if (shape.layers + shape.mtp_layers) * max(1, shape.experts) > MAX_EXPERTS:
        raise config.error(
            f"{shape.layers} layers, {shape.mtp_layers} of multi-token prediction, and "
            f"{shape.experts} experts in each are too many: at most {MAX_EXPERTS} are supported"
        )
    return shape


def check_architectures(folder: Path) -> None:
    """Raises ValueError if vLLM, which reads `architectures`, would build another model than
    transformers, which reads `model_type`."""
    config = read_config(folder / "config.json")
    family = FAMILIES.get(config.family)
    for name in config.raw.get("architectures") or ():
        if family and family.architecture and name != family.architecture:
            raise config.error(
                f"architectures has {name}, but the language model of model_type={config.family} "
                f"is {family.architecture}; correct one of them, or choose another model"
            )


def _read_bridged(config: ConfigReader, folder: Path | None) -> ModelShape:
    """Reads the sizes of a family that Megatron-Bridge builds and converts. Raises ValueError if
    Megatron-Bridge, Transformer Engine or the folder is missing."""
    raw = config.raw
    family = raw.get("model_type")
    missing = [
        name
        for name in ("megatron.bridge", "transformer_engine")
        if folder is None or not is_installed(name)
    ]
    if missing:
        lacking = ", and use a folder with weights"
        if folder:
            lacking = f" (missing: {', '.join(missing)})"
        raise config.error(
            f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}. Add a "
            "table (CONTRIBUTING.md, 'Adding a model family'), or install Megatron-Bridge and "
            f"Transformer Engine{lacking}"
        )
    config.only_neutral("is_encoder_decoder", CONFIG_KEY)
    experts = config.count("num_experts")
    experts_per_token = 0
    moe_intermediate = 0
    if experts:
        experts_per_token = config.count("num_experts_per_tok")
        moe_intermediate = config.count("moe_intermediate_size", config.count("intermediate_size"))
    latent = read_latent(config) if raw.get("kv_lora_rank") else None
    return ModelShape(
        **read_sizes(config, latent=latent),
        rms_eps=0.0,  # Megatron-Bridge reads this and the next value itself
        rope_theta=0.0,
        experts=experts,
        experts_per_token=experts_per_token,
        moe_intermediate=moe_intermediate,
        mtp_layers=config.count("num_mtp_layers"),
        bridge=folder,
    )


def megatron_table(
    shape: ModelShape, *, spec: LayerSpec = "local", padded_vocab: int | None = None
) -> Table:
    """Returns the table of Megatron's parameters. `padded_vocab`: rows of the embedding over all
    ranks; None: no padding. Raises ValueError for a family without a table."""
    if shape.bridge is not None:
        raise ValueError(
            f"{shape.family} has no table: it can be trained and synced, but `megarl plan` and "
            "`megarl convert` do not support it"
        )
    return FAMILIES[shape.family].table(shape, spec, padded_vocab or shape.vocab)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Returns the embedding rows over all `tensor` ranks of the trainer: a multiple of 8 per rank,
    for GEMMs."""
    multiple = 8 * tensor
    return -(-vocab // multiple) * multiple


def hf_shapes(shape: ModelShape, *, mtp: bool = False) -> ShapesByName:
    """Returns the full shapes of the HF checkpoint's tensors, without a tied lm_head; for a family
    without a table, those of all tensors in the folder. `mtp` adds multi-token prediction, which
    neither trainer nor engine builds."""
    if shape.bridge is not None:
        return header_shapes(shape.bridge)
    return shapes_of(megatron_table(shape), shape, mtp=mtp)


def fp32_tensors(shape: ModelShape) -> frozenset[str]:
    """Returns the HF tensors that both Megatron and vLLM keep in fp32, for any training dtype."""
    if shape.bridge is not None:
        biases = ("correction_bias", "expert_bias")  # of routers
        return frozenset(name for name in header_shapes(shape.bridge) if name.endswith(biases))
    layers = range(shape.layers + shape.mtp_layers)
    return frozenset(
        template.format(layer=layer)
        for template, layer in product(megatron_table(shape).bits, layers)
    ).intersection(hf_shapes(shape, mtp=True))
