from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    parts = [tensors, {"lm_head.weight": head}]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, folder / "model" / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
