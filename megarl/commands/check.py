"""`megarl check CONFIG`: compares layouts, or trainer and engine; lists the precision of modules.

--layouts         compare_layouts --layouts.json--> ranks --check.json--> table
--parity, --sync  ranks
--precision       this process (precision.py)

The ranks run rank_checks.py; the files are in runs/<name>-check.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import lcm
from typing import TYPE_CHECKING

from megarl.commands.arguments import add_config, load
from megarl.layout import smallest_world
from megarl.platform.env import Env
from megarl.processes.exit_codes import DONE, REFUSED

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.config.validate import Job

NAME = "check"
HELP = "compare layouts on one update, or trainer and engine"
USUAL = ("1", "tp2", "pp2", "cp2", "ep2", "tp2,pp2", "tp2,ep2", "pp2,ep2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parity", action="store_true", help="do trainer and engine differ by more than rounding?"
    )
    parser.add_argument(
        "--sync", action="store_true", help="make one weight sync, verified as the first of a run"
    )
    parser.add_argument(
        "--precision", action="store_true", help="list the precision of every module on both sides"
    )
    parser.add_argument(
        "--layouts",
        metavar="LAYOUT",
        nargs="*",
        help="e.g. 1 tp2 tp2,pp2; default: common ones that fit the model",
    )
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    env = Env.read()
    if args.precision:
        from megarl.commands.precision import describe_precision
        from megarl.config.validate import check_config

        config = load(args, env)
        print(describe_precision(config, check_config(config, env, command="check").model))
        return DONE
    if args.parity or args.sync:
        from megarl.commands.start import start

        command = "sync"
        if args.parity:
            command = "parity"
        return start(command, args)
    layouts = [text for text in args.layouts if "=" not in text]
    return compare_layouts(load(args, env), layouts, env)


def compare_layouts(config: "Config", layouts: Sequence[str], env: Env) -> int:
    """Compares one update in several layouts, prints a table, and returns the exit code.

    Without `layouts`, compares the layouts of USUAL that fit the model. Raises ValueError if one of
    `layouts` does not fit.
    """
    from megarl.commands.downloads import download_weights
    from megarl.commands.random_model import materialize_model
    from megarl.commands.start import launch
    from megarl.config.load import changed
    from megarl.config.run_dir import make_run_dir

    config = changed(config, "run", name=f"{config.run.name}-check")
    fits, world, job = _fitting(config, layouts, env)
    download_weights(config, env, "check")
    make_run_dir(config)
    folder = config.run_dir
    (folder / "check.json").unlink(missing_ok=True)
    (folder / "layouts.json").write_text(json.dumps(fits))
    code = launch(env, materialize_model(_under(config, fits[0], world)), job, "check")
    if code != DONE:
        return code
    rows = json.loads((folder / "check.json").read_text())
    print(
        f"{world} ranks, one update, {config.train.dtype}; "
        f"compared with {rows[0]['layout']}, where nothing is recomputed or offloaded"
    )
    code = DONE
    for row in rows:
        measured = f"loss {row['loss']:<12.7g} gradient norm {row['grad_norm']:<12.7g}"
        print(f"{row['layout']:<14} {measured} {row['difference'] or 'agrees'}")
        if row["difference"]:
            code = REFUSED
    return code


def _fitting(config: "Config", layouts: Sequence[str], env: Env) -> tuple[list[str], int, "Job"]:
    """Returns (layouts that fit the model, number of ranks, job of the last fitting layout)."""
    from megarl.commands.preflight import preflight
    from megarl.parity.layouts import parse_layout  # imports torch

    candidates = layouts or USUAL
    sizes = [smallest_world(parse_layout(text), 1) for text in candidates]
    world = config.launch.processes or lcm(*sizes)
    fits = []
    for text in candidates:
        try:
            job = preflight(_under(config, text, world), env, command="check")
        except ValueError:
            if layouts:
                raise
            continue
        fits.append(text)
    return fits, world, job


def _under(config: "Config", text: str, world: int) -> "Config":
    """Returns the config, changed to the layout `text` (for example "tp2,pp2") on `world` ranks."""
    from megarl.config.load import changed
    from megarl.parity.layouts import parse_layout

    config = changed(config, "launch", processes=world)
    return changed(config, "parallel", **asdict(parse_layout(text)))
