"""Packages that only some settings need. No torch."""

import yaml

from megarl.platform.env import is_installed

# module: its project, and what installs it
OPTIONAL = yaml.safe_load("""
    torch: "PyTorch: pip install megarl[cpu] or megarl[gpu]"
    megatron.core: "Megatron-Core: pip install megarl[cpu] or megarl[gpu]"
    vllm: "vLLM: pip install megarl[cpu] or megarl[gpu]"
    transformer_engine: "Transformer Engine: pip install megarl[gpu]"
    ray: "Ray: pip install megarl[ray]"
    datasets: "datasets: pip install megarl[hf]"
    tensorboard.summary: "TensorBoard: pip install megarl[tensorboard]"
    wandb.sdk: "wandb: pip install megarl[wandb]"
    uvicorn: "uvicorn: pip install megarl[serve]"
    starlette: "Starlette: pip install megarl[serve]"
    sentencepiece: "SentencePiece: pip install sentencepiece"
    google.protobuf: "protobuf: pip install protobuf"
    tiktoken: "tiktoken: pip install tiktoken"
""")


def require(setting: str, *modules: str) -> None:
    """Raises ValueError, with the command that installs it, if a module of OPTIONAL is missing."""
    for module in modules:
        if not is_installed(module):
            raise ValueError(f"{setting} needs {OPTIONAL[module]}")
