"""Section `lora`: low-rank adapters of the policy, and its checks."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.section import Config, Section, refuse
from megarl.models.config_json import read_config
from megarl.models.headers import read_headers
from megarl.models.lora import CONFIG, adapter_table, targets_of
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Table, is_expert, shapes_of
from megarl.models.weights import check_tensors

MAX_ENGINE_RANK = 512  # limit of vLLM 0.32
# keys of PEFT's config that are supported, or do not change what an adapter computes
ACCEPTED = """
    r lora_alpha target_modules lora_dropout task_type auto_mapping peft_version
    base_model_name_or_path revision inference_mode layers_pattern megatron_core
    qalora_group_size runtime_config
"""
# key -> supported values; some of the others change the base model (pissa, olora, corda, loftq)
SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian"),
}


class Lora(Section):
    """Low-rank adapters of linear layers. Only adapters are trained; the base model is the
    reference policy."""

    rank: PositiveInt = 16
    """Rank of an adapter."""
    alpha: PositiveFloat = 32.0
    """Scale: an adapter adds alpha / rank * B A x."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers with adapters, by Hugging Face names such as q_proj; all-linear: all except router and
    head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of an adapter, in the stages sft and dpo."""
    sync: Literal["merged", "adapter"] = "merged"
    """Weights that a sync sends: merged weights, or only adapters while the engine keeps the base
    model."""
    path: str | None = None
    """Folder of a PEFT adapter to start from; null: B = 0, which equals the base model."""


def check_lora(config: Config, shape: ModelShape, *, has_engine: bool) -> None:
    """Raises ValueError if the model, the stage or other settings do not support `lora`, or the
    adapter in lora.path differs from it; FileNotFoundError if lora.path is not an adapter.
    """
    lora = config.lora
    if lora is None:
        return
    quantization = config.rollout.quantization
    bias_rate = config.moe.bias_update_rate
    second = f"stage: {config.stage}"
    if config.algorithm.needs_critic:
        second = "algorithm.advantage=gae"
    refuse(
        (
            shape.bridge,
            f"lora is set, but {shape.family} has no table; use a model with one, or remove lora",
        ),
        (
            config.algorithm.needs_critic or config.stage_spec.trains_second,
            f"lora is set, but {second} trains a second head or model, which it does not adapt; "
            "remove lora",
        ),
        (
            lora.dropout and has_engine,
            f"lora.dropout={lora.dropout} makes the trainer's log-probs differ from the engine's; "
            "set it to 0",
        ),
        (
            bias_rate,
            f"moe.bias_update_rate={bias_rate} changes the base model, which lora keeps; "
            "set it to 0",
        ),
        (
            quantization != "none" and has_engine,
            f"lora is set, but rollout.quantization={quantization} would round away what small "
            "adapters add to the weights; set rollout.quantization=none, or remove lora",
        ),
    )
    table = adapter_table(megatron_table(shape), lora.targets, lora.rank)
    if lora.sync == "adapter" and has_engine:
        _check_engine(config, lora, shape, table)
    if lora.path is not None:
        _check_folder(lora, Path(lora.path), table, shape)


def _check_engine(config: Config, lora: Lora, shape: ModelShape, table: Table) -> None:
    experts = ", ".join(targets_of(filter(is_expert, table.layer_rules)))
    remedy = "; set lora.sync=merged"
    refuse(
        (config.launch.is_split, f"launch.topology=split moves whole weights{remedy}"),
        (experts, f"lora.targets has {experts} of experts, which vLLM cannot adapt here{remedy}"),
        (
            shape.latent,
            "vLLM multiplies latent attention's projections in advance, without their adapters"
            f"{remedy}",
        ),
        (
            lora.rank > MAX_ENGINE_RANK,
            f"lora.rank={lora.rank} exceeds vLLM's largest, {MAX_ENGINE_RANK}{remedy}",
        ),
        (
            config.rollout.sleep_level == 2,
            f"rollout.sleep_level=2 frees the engine's base weights, which are sent once{remedy}",
        ),
        start="lora.sync=adapter: ",
    )


def _check_folder(lora: Lora, folder: Path, table: Table, shape: ModelShape) -> None:
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.path={folder} has no {CONFIG}; set it to the folder of a PEFT adapter"
        )
    values = read_config(file)
    rank = values.size("r")
    alpha = values.number("lora_alpha")
    for key, supported in SUPPORTED.items():
        value = values.raw.get(key, supported[0])
        if value not in supported:
            raise values.error(
                f"{key}={value} is not supported; supported: {', '.join(map(str, supported))}; "
                "others add more than B A, or are relative to a base model that they have changed"
            )
    accepted = {*ACCEPTED.split(), *SUPPORTED}
    for key, value in values.raw.items():
        if value and key not in accepted:  # PEFT's default is null, false or empty
            raise values.error(
                f"{key}={str(value)[:80]} is not supported; use a plain LoRA adapter"
            )
    for key, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise ValueError(
                f"lora.{key}={ours:g}, but the adapter in lora.path={folder} has {theirs:g}; set "
                "it to that"
            )
    shapes = shapes_of(table, shape)
    check_tensors(folder, read_headers(folder), shapes, None, config=f"{CONFIG} with lora.targets")
