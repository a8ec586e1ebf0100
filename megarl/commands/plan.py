"""`megarl plan CONFIG`: predicts memory by phase, bytes and time of a sync, and which layouts fit.

It needs no GPU.
"""

import argparse
import json
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from megarl.commands.arguments import add_config, load, size
from megarl.platform.env import Env
from megarl.processes.exit_codes import DONE, USER

if TYPE_CHECKING:
    from megarl.config.schema import Config

NAME = "plan"
HELP = "predict memory by phase, and bytes and time of a weight sync, without weights or a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="plan the sync from trainer to engines, too",
    )
    parser.add_argument(
        "--gpu",
        choices=("h100", "h200", "b200"),
        help="GPU type (default: launch.gpu, or else h100)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="list layouts for --gpus that fit, the fastest by prediction first",
    )
    parser.add_argument("--gpus", type=size, metavar="N", help="number of GPUs to search for")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="write the config with the first layout found"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        type=Path,
        help="write one line [round, sender, receiver, bytes] per message",
    )
    parser.add_argument(
        "--figure",
        metavar="FILE",
        type=Path,
        help="draw the bytes between stages and replicas to a .png or .svg file",
    )


def run(args: argparse.Namespace) -> int:
    from megarl.weights.plan.memory import describe_memory, plan_memory

    config = load(args, Env.read())
    gpu = args.gpu or config.launch.gpu or "h100"
    if args.search:
        return _search(args, config, gpu)
    if args.gpus or args.write:
        raise ValueError("--gpus and --write are for --search; add it, or remove them")
    figures = None
    if args.weights or args.messages or args.figure:
        figures = _plan_weights(args, config, gpu)
    memory = plan_memory(config, gpu=gpu)
    if args.json:
        values = memory.as_json()
        if figures:
            # the figures are at the top level, too, for scripts that read only these
            values = {**figures, **values, "weights": figures}
        print(json.dumps(values))
    else:
        print(describe_memory(memory))
    return USER if memory.problems else DONE


def _search(args: argparse.Namespace, config: "Config", gpu: str) -> int:
    from megarl.commands.search import describe_search, predict_peers, search_layouts
    from megarl.config.load import resolved_yaml
    from megarl.processes.files import write_atomic

    gpus = args.gpus or config.launch.processes
    if not gpus:
        raise ValueError("--search needs the number of GPUs: add --gpus N")
    began = monotonic()
    found = search_layouts(config, gpus=gpus, gpu=gpu)
    peers = predict_peers(config, gpu=gpu)
    if args.json:
        seconds = monotonic() - began
        rows = [row.as_json() for row in found]
        values = {"model": config.model.path, "gpus": gpus, "gpu": gpu, "seconds": seconds}
        print(json.dumps({**values, "rows": rows, "peers": peers}))
    else:
        print(describe_search(found, peers))
    if args.write:
        args.overrides = [*args.overrides, *found[0].overrides]
        write_atomic(args.write, resolved_yaml(load(args, Env.read())))
    return DONE


def _plan_weights(args: argparse.Namespace, config: "Config", gpu: str) -> dict[str, Any]:
    """Plans the sync, writes its files, and prints it unless the output is JSON."""
    from megarl.telemetry.plan_figure import draw_plan
    from megarl.weights.plan.from_config import describe_weights, plan_weights, write_messages

    if args.figure and args.figure.suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {args.figure} must be a .png or .svg file")
    plan, figures = plan_weights(config, gpu=gpu)
    if args.messages:
        write_messages(plan, args.messages)
    if args.figure:
        draw_plan(figures).savefig(args.figure, dpi=130)
    if not args.json:
        print(describe_weights(figures))
    return figures
