"""`megarl check CONFIG --layouts`: the user's own model and data, a small batch, one update in each layout.

check_layouts_of (here) --runs/<name>-check/layouts.json--> ranks, `check` --check.json--> a table, exit 0 or 3
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import lcm
from typing import TYPE_CHECKING

from megarl.config.load import run_dir
from megarl.config.schema import Algorithm, Config
from megarl.config.validate import Job
from megarl.launch.exit_codes import DONE, REFUSED
from megarl.launch.preflight import preflight
from megarl.layout import Layout, smallest_world
from megarl.platform.env import Env

if TYPE_CHECKING:
    from megarl.trainer.trainer import Actor

__all__ = ["check", "check_layouts_of"]

ROWS = 8  # of the batch; a row without an answer to learn gets RANDOM_TOKENS behind its prompt
RANDOM_TOKENS = 8
USUAL = ("1", "tp2", "pp2", "cp2", "ep2", "tp2,pp2", "tp2,ep2", "pp2,ep2")


def check_layouts_of(
    config: Config, layouts: Sequence[str], env: Env, launch: Callable[[Config, Job, str], int]
) -> int:
    """Compare one update under `layouts`, on ranks that `launch(config, job, command)` runs; returns the exit code.

    Without layouts: those of the usual ones that fit the model and four ranks.

    Raises ValueError for a layout that does not fit.
    """
    from megarl.debug.layout_check import AXES, parse_layout  # brings torch
    from megarl.launch.random_model import materialize_model

    config = config.model_copy(update={"run": config.run.model_copy(update={"name": f"{config.run.name}-check"})})

    def under(text: str, world: int) -> Config:
        sizes = {name: getattr(parse_layout(text), name) for name in AXES.values()}
        more = {"parallel": sizes, "launch": {**config.launch.model_dump(), "processes": world}}
        return Config.model_validate(config.model_dump() | more)

    given = list(layouts) or list(USUAL)
    fits, world = [], config.launch.processes or lcm(*(smallest_world(parse_layout(text), 1) for text in given))
    for text in given:
        try:
            job = preflight(under(text, world), env, command="check")
        except ValueError:
            if layouts:
                raise
            continue
        fits.append(text)
    folder = run_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").unlink(missing_ok=True)
    (folder / "layouts.json").write_text(json.dumps(fits))
    code = launch(materialize_model(under(fits[0], world)), job, "check")
    if code != DONE:
        return code
    rows = json.loads((folder / "check.json").read_text())
    print(f"{world} ranks, one update on {ROWS} rows, {config.train.dtype}; each beside {rows[0]['layout']}")
    for row in rows:
        print(
            f"{row['layout']:<14} loss {row['loss']:<12.7g} gradient norm {row['grad_norm']:<12.7g} "
            f"{row['difference'] or 'agrees'}"
        )
    return REFUSED if any(row["difference"] for row in rows) else DONE


def check(config: Config, env: Env) -> None:
    """On one rank."""
    from megarl.data.supervised import Examples
    from megarl.debug.layout_check import check_layouts, compare, rows_of
    from megarl.launch.build import world
    from megarl.trainer.trainer import Actor

    folder = run_dir(config)
    with world(config, env) as parts:
        prompts = parts.prompts().take(ROWS)
        batch = (
            Examples(parts.tokenizer)(prompts)
            if config.stage == "sft"
            else rows_of(prompts, num_tokens=RANDOM_TOKENS, vocab=parts.shape.vocab)
        )
        algorithm = Algorithm(advantage="none", loss="sft", aggregation="token-mean", correction="none")
        train = config.train.model_copy(update={"updates_per_step": 1})
        small = config.model_copy(update={"algorithm": algorithm, "train": train})

        def build(config: Config, layout: Layout) -> Actor:
            return Actor.build(config, parts.shape, layout, folder=parts.model_folder, device=parts.device.torch)

        layouts = json.loads((folder / "layouts.json").read_text())
        found = check_layouts(small, layouts, batch, build, world=env.world_size, rank=env.rank)
        if env.is_main:
            rows = [asdict(row) for row in compare(found, config.train.dtype)]
            (folder / "check.json").write_text(json.dumps(rows))
