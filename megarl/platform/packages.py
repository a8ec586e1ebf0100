"""Packages that only some settings need. No torch."""

from megarl.platform.env import is_installed

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
