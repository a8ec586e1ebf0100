"""Packages that only some settings need, and whether they are installed. No torch."""

import sys
from importlib.machinery import ModuleSpec
from itertools import accumulate
from typing import Any

BASE = "pip install megarl[cpu] or megarl[gpu]"
OPTIONAL = {  # module: its project, and what installs it
    "torch": f"PyTorch: {BASE}",
    "megatron.core": f"Megatron-Core: {BASE}",
    "vllm": f"vLLM: {BASE}",
    "transformer_engine": "Transformer Engine: pip install megarl[gpu]",
    "ray": "Ray: pip install megarl[ray]",
    "datasets": "datasets: pip install megarl[hf]",
    "tensorboard.summary": "TensorBoard: pip install megarl[tensorboard]",
    "wandb.sdk": "wandb: pip install megarl[wandb]",
    "uvicorn": "uvicorn: pip install megarl[serve]",
    "starlette": "Starlette: pip install megarl[serve]",
    "sentencepiece": "SentencePiece: pip install sentencepiece",
    "google.protobuf": "protobuf: pip install protobuf",
    "tiktoken": "tiktoken: pip install tiktoken",
}


def require(setting: str, *modules: str) -> None:
    """Raises ValueError, with the command that installs it, if a module of OPTIONAL is missing."""
    for module in modules:
        if not is_installed(module):
            raise ValueError(f"{setting} needs {OPTIONAL[module]}")


def is_installed(module: str) -> bool:
    """Returns True if `module` (dotted) can be imported, without importing it or its parents."""
    path = None
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = _find(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _find(name: str, path: Any) -> ModuleSpec | None:
    if sys.modules.get(name, name) is None:  # import refuses it
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except ImportError:
            return None
        except Exception:  # noqa: BLE001 (a broken finder is no answer)
            continue
        if spec:
            return spec
    return None
