"""`megarl check CONFIG --layouts`: one update on a small batch of the user's data, in each layout.

check_layouts_of --runs/<name>-check/layouts.json--> ranks (run_check) --check.json--> a table, exit code 0 or 3
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import lcm

from megarl.config.load import changed, run_dir
from megarl.config.schema import Config
from megarl.config.validate import Job
from megarl.launch.exit_codes import DONE, REFUSED
from megarl.launch.preflight import preflight
from megarl.layout import smallest_world
from megarl.platform.env import Env

USUAL = ("1", "tp2", "pp2", "cp2", "ep2", "tp2,pp2", "tp2,ep2", "pp2,ep2")


def check_layouts_of(
    config: Config, layouts: Sequence[str], env: Env, launch: Callable[[Config, Job, str], int]
) -> int:
    """Compare one update under `layouts`, or those of USUAL that fit the model, on ranks that `launch(config, job,
    command)` runs; returns the exit code. Raises ValueError for a layout that does not fit."""
    from megarl.debug.layout_check import parse_layout  # imports torch
    from megarl.launch.downloads import download_weights
    from megarl.launch.random_model import materialize_model
    from megarl.launch.run_config import make_run_dir

    config = changed(config, "run", name=f"{config.run.name}-check")

    def under(text: str, world: int) -> Config:
        values = changed(config, "launch", processes=world).model_dump() | {
            "parallel": asdict(parse_layout(text))
        }
        return Config.model_validate(values)

    candidates = list(layouts) or list(USUAL)
    fits, world = (
        [],
        config.launch.processes
        or lcm(*(smallest_world(parse_layout(text), 1) for text in candidates)),
    )
    for text in candidates:
        try:
            job = preflight(under(text, world), env, command="check")
        except ValueError:
            if layouts:
                raise
            continue
        fits.append(text)
    download_weights(config, env, "check")
    make_run_dir(config)
    folder = run_dir(config)
    (folder / "check.json").unlink(missing_ok=True)
    (folder / "layouts.json").write_text(json.dumps(fits))
    code = launch(materialize_model(under(fits[0], world)), job, "check")
    if code != DONE:
        return code
    rows = json.loads((folder / "check.json").read_text())
    print(
        f"{world} ranks, one update, {config.train.dtype}; each layout compared with {rows[0]['layout']}"
    )
    for row in rows:
        print(
            f"{row['layout']:<14} loss {row['loss']:<12.7g} gradient norm {row['grad_norm']:<12.7g} "
            f"{row['difference'] or 'agrees'}"
        )
    return REFUSED if any(row["difference"] for row in rows) else DONE
