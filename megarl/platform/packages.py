"""Packages that only some settings need, and whether they are installed. No torch."""

import sys
from importlib.machinery import ModuleSpec
from typing import Any

OPTIONAL = {  # module: its project, and what to install
    "torch": ("PyTorch", "megarl[cpu] or megarl[gpu]"),
    "megatron.core": ("Megatron-Core", "megarl[cpu] or megarl[gpu]"),
    "vllm": ("vLLM", "megarl[cpu] or megarl[gpu]"),
    "transformer_engine": ("Transformer Engine", "megarl[gpu]"),
    "ray": ("Ray", "megarl[ray]"),
    "datasets": ("datasets", "megarl[hf]"),
    "tensorboard.summary": ("TensorBoard", "megarl[tensorboard]"),
    "wandb.sdk": ("wandb", "megarl[wandb]"),
    "uvicorn": ("uvicorn", "megarl[serve]"),
    "starlette": ("Starlette", "megarl[serve]"),
    "sentencepiece": ("SentencePiece", "sentencepiece"),
    "google.protobuf": ("protobuf", "protobuf"),
    "tiktoken": ("tiktoken", "tiktoken"),
}


def require(setting: str, *modules: str) -> None:
    """Raises ValueError, with the command that installs it, if a module of OPTIONAL is missing."""
    for module in modules:
        if not is_installed(module):
            project, package = OPTIONAL[module]
            raise ValueError(f"{setting} needs {project}: pip install {package}")


def is_installed(module: str) -> bool:
    """Returns True if `module` (dotted) can be imported, without importing it or its parents."""
    name = ""
    path = None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
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
