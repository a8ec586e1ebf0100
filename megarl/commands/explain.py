"""`megarl explain KEY`: prints type, default and text of a config key, and what checks it."""

import argparse
import json
import re

from megarl.config.load import explain_unknown
from megarl.config.reference import checks_of, keys, presets_of
from megarl.config.stages import STAGES

NAME = "explain"
HELP = "explain a key of the config, or list the keys of a section"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="?",
        default="",
        help="a key or a section, e.g. train.lr; without it, the sections are listed",
    )


def run(args: argparse.Namespace) -> None:
    """Prints the key; raises ValueError if it does not exist."""
    known = {key.name: key for key in keys()}
    name = re.sub(r"\.\d+\b", "", args.key)  # rewards.0.weight
    path = name.split(".")
    while len(path) > 1 and ".".join(path[:-1]) not in known:
        path.pop()  # names the first part that does not exist
    if name and name not in known:
        raise ValueError(explain_unknown(path, {}))
    if name:
        key = known[name]
        print(f"{name}: {key.kind}\n{key.text}")
        stages = [stage for stage in STAGES if name.partition(".")[0] in STAGES[stage].sections]
        if stages:
            print(f"Only for stage: {' or '.join(stages)}.")
        for preset, value in presets_of(name).items():
            print(f"  preset {preset}: {json.dumps(value)}")
        for cause in checks_of(name):
            print(f"  exit code 2 {cause}")
    for key in known.values():
        if key.name.rpartition(".")[0] == name and key.name != name:
            print(f"  {key.name}: {key.text}")
