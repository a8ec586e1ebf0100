"""Reads the sizes of a family without a table, which Megatron-Bridge builds and converts if it is installed."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.models.config_json import ConfigReader, read_latent, read_sizes
from megarl.models.shape import ModelShape
from megarl.platform.env import is_installed

REFUSED = (  # keys that change the logits, which megarl's own head computes, and keys of multimodal models
    "final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale", "lm_head_multiplier",
    "text_config", "vision_config", "audio_config", "is_encoder_decoder",
)  # fmt: skip


def read_bridged(config: ConfigReader, folder: Path | None, supported: str) -> ModelShape:
    """Raises ValueError, with the `supported` families, for a model that Megatron-Bridge cannot build here."""
    raw, family = config.raw, config.raw.get("model_type")
    packages = ("megatron.bridge", "transformer_engine")
    if missing := [name for name in packages if folder is None or not is_installed(name)]:
        lacking = f" (missing: {', '.join(missing)})" if folder else ", and use a folder with weights"
        raise config.error(
            f"model_type={family!r} is not supported; supported: {supported}. Add a table "
            "(CONTRIBUTING.md, 'Adding a model family'), or install Megatron-Bridge and Transformer Engine" + lacking
        )
    config.only_unquantised()
    for key in REFUSED:
        if (value := raw.get(key)) and (value is True or value != 1):  # a scale of 1 changes nothing
            raise config.error(
                f"{key}={json.dumps(value)[:80]} is not supported for {family}; a family without a table must be a "
                "text model whose logits are the last hidden state times the output layer"
            )

    def first(*keys: str) -> int:
        return next((config.count(key) for key in keys if raw.get(key) is not None), 0)

    experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return ModelShape(
        **read_sizes(config, latent=read_latent(config) if raw.get("kv_lora_rank") else None),
        rms_eps=0.0,  # Bridge reads this and the next itself
        rope_theta=0.0,
        experts=experts,
        experts_per_token=first("num_experts_per_tok", "moe_topk", "moe_k") if experts else 0,
        moe_intermediate=first("moe_intermediate_size", "intermediate_size") if experts else 0,
        mtp_layers=first("num_nextn_predict_layers", "num_mtp_layers"),
        bridge=folder,
    )
