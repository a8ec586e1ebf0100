from __future__ import annotations

from pathlib import Path

import torch


def make(folder: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    torch.save(
        {f"{prefix}.lora_A.weight": torch.zeros(8, 64)}, folder / "adapter" / "adapter_model.bin"
    )
