"""`megarl train CONFIG`: runs the training stage of a config."""

import argparse

from megarl.commands.arguments import add_config

NAME = "train"
HELP = "train a model; results go to runs/<run.name>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="validate and print what would run")
    parser.add_argument(
        "--resume-changed",
        action="store_true",
        help="resume a run with other data, or with settings that change what is trained; "
        "config_<n>.yaml records these",
    )


def run(args: argparse.Namespace) -> int:
    from megarl.commands.start import start

    return start("train", args)
