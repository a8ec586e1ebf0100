"""Starts the ranks of `megarl train`, `eval` and `check`: from the config to the exit code.

config --preflight--> Job --launch--> run/rank_process.py | Ray (split/) --> report, exit code
"""

import argparse
import json

from megarl.commands.downloads import download_weights, hub_datasets, hub_models, pin_revisions
from megarl.commands.preflight import describe, preflight
from megarl.commands.random_model import materialize_model
from megarl.config.load import changed, load_config
from megarl.config.run_dir import check_resumed, make_run_dir
from megarl.config.schema import Config
from megarl.config.validate import Job
from megarl.platform.env import RESUME_CHANGED, Env, set_env
from megarl.processes.exit_codes import DEFECT, DONE, STOPPED, USER, Failure, say, write_exit


def start(command: str, args: argparse.Namespace) -> int:
    """Checks the config, downloads models and data, runs `command`, and returns the exit code.

    With --dry-run, prints the resolved config instead of running.
    """
    env = Env.read()
    set_env(**{RESUME_CHANGED: int(args.resume_changed) or None})
    config = load_config(args.config, args.overrides)
    if command != "train":  # use a separate folder next to the run's
        config = changed(config, "run", name=f"{config.run.name}-{command}")
    try:
        config = pin_revisions(config, env, hub_models)
        config = pin_revisions(config, env, hub_datasets)
        job = preflight(config, env, command=command, is_dry=args.dry_run)
        if not args.dry_run:
            download_weights(config, env, command)
            make_run_dir(config)
            config = materialize_model(config)
            is_checked = command == "train" and not args.resume_changed
            if is_checked and check_resumed(config) and not env.has_launcher:
                say(f"{config.run_dir} is complete; raise train.steps, or set another run.name")
                return DONE
    except (ValueError, FileNotFoundError) as error:
        if env.has_launcher and env.is_main:  # torchrun turns every exit code into 1
            write_exit(config.run_dir, USER, Failure(0, USER, str(error), "start-up"))
        raise
    if env.is_main:
        for warning in job.warnings:
            say(f"warning: {warning}")
        if job.memory.startswith("not checked") and not args.dry_run:
            print(f"memory {job.memory}", flush=True)
    if args.dry_run:
        print(describe(config, job))
        return DONE
    code = launch(env, config, job, command)
    if code not in (DEFECT, STOPPED) and command == "train" and env.is_main:
        _report(env, config, job, code)
    return code


def launch(env: Env, config: Config, job: Job, command: str) -> int:
    """Runs all ranks of a job, or only this rank under torchrun or Slurm; returns the exit code."""
    if env.has_launcher:
        from megarl.run.rank_process import run_external

        return run_external(config, env, command)
    if config.launch.is_split:
        from megarl.split.entry import run_split

        return run_split(config)
    from megarl.processes.spawn import spawn_ranks

    return spawn_ranks(config, job, command)


def _report(env: Env, config: Config, job: Job, code: int) -> None:
    """Writes the run's report, unless no step has finished."""
    from megarl.telemetry.report import write_report

    try:
        # the planner needs a weight table, which bridged models lack
        if config.stage_spec.needs_engine and job.model.bridge is None:
            _write_plan(env, config, job.world)
        print(f"report: {write_report(config.run_dir)}")
    except FileNotFoundError:  # no step has finished
        pass
    except OSError as error:
        if code == DONE:  # otherwise the error has already ended the run and been reported
            raise OSError(error.errno, error.strerror, str(config.run_dir)) from None


def _write_plan(env: Env, config: Config, world: int) -> None:
    """Writes the plan of the run's weight sync, which the report draws."""
    from megarl.telemetry.report import PLAN
    from megarl.weights.plan.from_config import plan_weights

    per_node = config.launch.processes_per_node
    if per_node is None and not config.launch.is_split:
        per_node = env.local_world_size if env.has_launcher else world
    config = changed(config, "launch", processes=world, processes_per_node=per_node)
    _, figures = plan_weights(config)
    (config.run_dir / PLAN).write_text(json.dumps(figures), encoding="utf-8")
