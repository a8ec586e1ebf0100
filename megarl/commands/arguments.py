"""Arguments shared by several commands: a config with overrides, and sizes. Fast to import."""

import argparse
from typing import TYPE_CHECKING

from megarl.platform.env import Env

if TYPE_CHECKING:
    from megarl.config.schema import Config


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file, e.g. configs/quickstart.yaml"
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="override a value, e.g. train.lr=1e-5"
    )


def load(args: argparse.Namespace, env: Env) -> "Config":
    """Loads the config with its overrides, and resolves revisions of hub models to commits."""
    from megarl.commands.downloads import hub_models, pin_revisions
    from megarl.config.load import load_config

    return pin_revisions(load_config(args.config, args.overrides), env, hub_models)


def size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
