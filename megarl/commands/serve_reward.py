"""`megarl serve-reward FOLDER`: serves a reward model over HTTP (reward_server.py)."""

import argparse
from pathlib import Path

from megarl.platform.env import require

NAME = "serve-reward"
HELP = "score responses with a reward model, over HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="a reward model in Hugging Face format"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine)",
    )
    parser.add_argument("--port", type=int, default=8000, help="(default: 8000; 0: a free one)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="bf16", help="of the weights (default: bf16)"
    )


def run(args: argparse.Namespace) -> None:
    require("megarl serve-reward", "torch", "megatron.core", "uvicorn", "starlette")
    from megarl.commands.reward_server import serve_reward

    serve_reward(args.folder, host=args.host, port=args.port, dtype=args.dtype)
