"""Checks of the section `lora`: its targets, the adapter it begins with, and what does not go together with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.config.section import Lora
from megarl.models.lora import CONFIG, adapter_table, targets_of
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Table
from megarl.platform.json_text import parse_json

MAX_ENGINE_RANK = 512  # vLLM 0.32
UNSUPPORTED = (  # of PEFT: settings that change what an adapter computes, and lists of modules that are stored whole
    "use_dora", "use_rslora", "use_qalora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias",
    "layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "fan_in_fan_out",
)  # fmt: skip


def check_lora(config: Config, shape: ModelShape, *, has_engine: bool) -> None:
    """Raises ValueError with the values and the remedy."""
    lora, stage = config.lora, config.stage
    if lora is None:
        return
    if shape.bridge is not None:
        raise ValueError(f"lora is set, but {shape.family} has no table; use a model with one, or remove lora")
    if stage in ("reward_model", "iterative_grpo") or config.algorithm.needs_critic:
        what = "algorithm.advantage=gae" if config.algorithm.needs_critic else f"stage: {stage}"
        raise ValueError(f"lora is set, but {what} trains a second head or model, which it does not adapt; remove lora")
    if lora.dropout and has_engine:
        raise ValueError(
            f"lora.dropout={lora.dropout} makes the trainer's log-probs differ from the engine's; set it to 0"
        )
    if config.moe.bias_update_rate:
        raise ValueError(
            f"moe.bias_update_rate={config.moe.bias_update_rate} changes the base model, which lora keeps; set it to 0"
        )
    if (quantization := config.rollout.quantization) != "none" and has_engine:
        raise ValueError(
            f"lora is set, but rollout.quantization={quantization} would round away what small adapters add to the "
            "weights; set rollout.quantization=none, or remove lora"
        )
    table = adapter_table(megatron_table(shape, spec="local", padded_vocab=shape.vocab), lora.targets, lora.rank)
    if lora.sync == "adapter" and has_engine:
        _check_engine(config, lora, shape, table)
    if lora.path is not None:
        _check_folder(lora, lora.path, table)


def _check_engine(config: Config, lora: Lora, shape: ModelShape, table: Table) -> None:
    reason = None
    if config.launch.topology == "split":
        reason = "launch.topology=split moves whole weights"
    elif table.expert:
        names = sorted(targets_of(Table((), (), (), table.expert)))
        reason = f"lora.targets has {', '.join(names)} of experts, which vLLM cannot adapt here"
    elif shape.latent is not None:
        reason = "vLLM multiplies latent attention's projections in advance, without their adapters"
    elif lora.rank > MAX_ENGINE_RANK:
        reason = f"lora.rank={lora.rank} exceeds vLLM's largest, {MAX_ENGINE_RANK}"
    elif config.rollout.sleep_level == 2:
        reason = "rollout.sleep_level=2 frees the engine's base weights, which are sent once"
    if reason:
        raise ValueError(f"lora.sync=adapter: {reason}; set lora.sync=merged")


def _check_folder(lora: Lora, path: str, table: Table) -> None:
    file = Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"lora.path={path} has no {CONFIG}; set it to the folder of a PEFT adapter")
    try:
        values: Any = parse_json(file.read_bytes())
        alpha, rank = float(values["lora_alpha"]), int(values["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the config of a LoRA adapter ({error!r}); set lora.path to one") from None
    if unsupported := [key for key in UNSUPPORTED if values.get(key)] + ["bias"] * (
        values.get("bias", "none") != "none"
    ):
        raise ValueError(
            f"{file}: {unsupported[0]}={values[unsupported[0]]} is not supported; use a plain LoRA adapter"
        )
    for key, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise ValueError(f"lora.{key}={ours:g}, but the adapter in lora.path={path} has {theirs:g}; set it to that")
