"""`megarl eval CONFIG`: measures accuracy on held-out problems. Ranks run stages/evaluation.py."""

import argparse

from megarl.commands.arguments import add_config

NAME = "eval"
HELP = "measure a model's accuracy on held-out problems of the task"
add_arguments = add_config


def run(args: argparse.Namespace) -> int:
    from megarl.commands.start import start

    return start("eval", args)
