"""`megarl plan CONFIG --weights`: predicts bytes and time of a sync, without weights or a GPU."""

import argparse
import json
from pathlib import Path

from megarl.commands.arguments import add_config, load
from megarl.platform.env import Env

NAME = "plan"
HELP = "predict bytes and time of a weight sync, without weights or a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--weights",
        action="store_true",
        required=True,
        help="plan the sync from trainer to engines",
    )
    parser.add_argument(
        "--gpu", choices=("h100", "h200", "b200"), default="h100", help="GPU type (default: h100)"
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


def run(args: argparse.Namespace) -> None:
    from megarl.telemetry.plan_figure import draw_plan
    from megarl.weights.plan.from_config import describe_weights, plan_weights, write_messages

    if args.figure and args.figure.suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {args.figure} must be a .png or .svg file")
    plan, figures = plan_weights(load(args, Env.read()), gpu=args.gpu)
    if args.messages:
        write_messages(plan, args.messages)
    if args.figure:
        draw_plan(figures).savefig(args.figure, dpi=130)
    describe = describe_weights
    if args.json:
        describe = json.dumps
    print(describe(figures))
