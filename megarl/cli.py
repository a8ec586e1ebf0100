"""The command line: parses arguments, dispatches, returns the exit code (launch.exit_codes).

Work that needs torch runs in the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megarl.launch.exit_codes import (
    DEFECT,
    DONE,
    REFUSED,
    STOPPED,
    USER,
    Failure,
    classify,
    write_exit,
)
from megarl.platform.disk import full_disk
from megarl.platform.env import Env, get_env, is_interactive, redact

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.config.validate import Job

EPILOG = """\
A config is a YAML file; section.key=value arguments override its values:
  megarl train configs/quickstart.yaml train.steps=20 parallel.tensor=2
On several nodes, start the same command with torchrun (scripts/torchrun_multinode.sh, scripts/slurm.sbatch).
"""


class _Parser(argparse.ArgumentParser):
    def __init__(
        self, *, run: Callable[[argparse.Namespace], int] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.set_defaults(run=run)

    def error(self, message: str) -> NoReturn:
        self.exit(USER, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if stray := [text for text in rest if text.startswith("-") or "=" not in text]:
        parser.error(f"unknown argument {stray[0]}")
    # overrides may follow options
    args.overrides = [*args.overrides, *rest, *(text for text in args.layouts if "=" in text)]
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # the reader closed the pipe: `megarl plan ... | head`
        sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue] (nothing is flushed at exit)
        return DONE
    except Exception as error:
        full = full_disk(error, Path(error.filename or ".")) if isinstance(error, OSError) else ""
        code = REFUSED if full else classify(error)
        if code not in (USER, REFUSED):
            raise
        if full or get_env("RANK", "0") == "0":
            print(f"megarl: {full or redact(' '.join(str(error).split()))}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megarl",
        description="Reinforcement learning for language models: Megatron-Core trains, vLLM samples.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(overrides=[], layouts=[], dry_run=False, resume_changed=False)
    add = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser).add_parser
    train = add(
        "train", run=partial(_run, "train"), help="train a model; results go to runs/<run.name>"
    )
    train.add_argument("--dry-run", action="store_true", help="validate and print what would run")
    changed = "resume a run with settings that change what is trained; config_<n>.yaml records them"
    train.add_argument("--resume-changed", action="store_true", help=changed)
    evaluate = add(
        "eval",
        run=partial(_run, "eval"),
        help="measure a model's accuracy on held-out problems of the task",
    )
    plan = add(
        "plan", run=_plan, help="predict bytes and time of a weight sync, without weights or a GPU"
    )
    check = add("check", run=_check, help="compare layouts on one update, or trainer and engine")
    layouts = "e.g. 1 tp2 tp2,pp2; default: common ones that fit the model"
    check.add_argument(
        "--parity", action="store_true", help="do trainer and engine differ by more than rounding?"
    )
    check.add_argument(
        "--sync", action="store_true", help="make one weight sync, verified as the first of a run"
    )
    check.add_argument(
        "--precision", action="store_true", help="list the precision of every module on both sides"
    )
    check.add_argument("--layouts", metavar="LAYOUT", nargs="*", default=[], help=layouts)
    for each in (train, evaluate, plan, check):
        each.add_argument(
            "config", metavar="CONFIG", help="a YAML file, e.g. configs/quickstart.yaml"
        )
        each.add_argument(
            "overrides", metavar="key=value", nargs="*", help="override a value, e.g. train.lr=1e-5"
        )
    report = add("report", run=_report, help="draw the curves of runs: report.png and report.html")
    report.add_argument(
        "--compare",
        action="store_true",
        help="draw the runs together: compare.html beside the first",
    )
    report.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        type=Path,
        help="a run directory, e.g. runs/quickstart",
    )
    ledger = add(
        "audit",
        run=_audit,
        help="balance a run's ledger: what became of every prompt; exit 3 if it does not",
    )
    ledger.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="a run directory, e.g. runs/quickstart"
    )
    plan.add_argument(
        "--weights",
        action="store_true",
        required=True,
        help="plan the sync from trainer to engines",
    )
    plan.add_argument(
        "--gpu", choices=("h100", "h200", "b200"), default="h100", help="GPU type (default: h100)"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    plan.add_argument(
        "--messages",
        metavar="FILE",
        type=Path,
        help="write one line [round, sender, receiver, bytes] per message",
    )
    plan.add_argument(
        "--figure",
        metavar="FILE",
        type=Path,
        help="draw ranks and transfers to a .png or .svg file",
    )
    convert = add(
        "convert",
        run=_convert,
        help="HF model <-> Megatron distributed checkpoint, streamed and verified",
    )
    convert.add_argument(
        "source", metavar="SRC", type=Path, help="HF model, Megatron checkpoint or a run's step_<n>"
    )
    convert.add_argument(
        "target", metavar="DST", type=Path, help="a new folder; an interrupted conversion resumes"
    )
    convert.add_argument("--to", required=True, choices=("megatron", "hf"), help="format of DST")
    for name, axis in (("tp", "tensor ranks"), ("pp", "pipeline stages"), ("ep", "expert ranks")):
        convert.add_argument(
            f"--{name}",
            metavar="N",
            type=_size,
            default=1,
            help=f"number of {axis} (1); any layout loads it",
        )
    convert.add_argument(
        "--config",
        metavar="DIR",
        type=Path,
        help="the HF model's folder, if SRC has no config.json",
    )
    convert.add_argument(
        "--export-format", choices=("bf16", "same"), default="bf16", help="as in a run's config"
    )
    convert.add_argument(
        "--file-gb", metavar="GB", type=float, help="maximum file size; default: as for export_hf"
    )
    serve = add(
        "serve-reward", run=_serve_reward, help="score responses with a reward model, over HTTP"
    )
    serve.add_argument(
        "folder", metavar="FOLDER", type=Path, help="a reward model in Hugging Face format"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine)",
    )
    serve.add_argument("--port", type=int, default=8000, help="(default: 8000; 0: a free one)")
    serve.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="bf16", help="of the weights (default: bf16)"
    )
    return parser


def _serve_reward(args: argparse.Namespace) -> int:
    from megarl.launch.serve_reward import serve_reward

    serve_reward(args.folder, host=args.host, port=args.port, dtype=args.dtype)
    return DONE


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _load(args: argparse.Namespace, env: Env) -> Config:
    """The config with its overrides, and the model's revision as a commit."""
    from megarl.config.load import load_config
    from megarl.launch.downloads import resolve_model

    return resolve_model(load_config(args.config, args.overrides), env)


def _plan(args: argparse.Namespace) -> int:
    import json

    from megarl.planner.weight_sync import describe_weights, plan_weights, write_messages
    from megarl.telemetry.plan_figure import draw_plan

    plan, figures = plan_weights(_load(args, Env.read()), gpu=args.gpu)
    if args.messages:
        write_messages(plan, args.messages)
    if args.figure:
        draw_plan(figures, args.figure)
    print(json.dumps(figures) if args.json else describe_weights(figures))
    return DONE


def _convert(args: argparse.Namespace) -> int:
    from megarl.checkpoint.hf import FILE_BYTES
    from megarl.launch.convert import run_convert
    from megarl.layout import Parallel

    sizes = Parallel(tensor=args.tp, pipeline=args.pp, expert=args.ep)
    file_bytes = FILE_BYTES if args.file_gb is None else int(args.file_gb * 1e9)
    options = {"config": args.config, "file_bytes": file_bytes, "interactive": is_interactive()}
    options["quantise"] = args.export_format == "same"
    print(run_convert(args.source, args.target, args.to, sizes, **options))
    return DONE


def _check(args: argparse.Namespace) -> int:
    if (args.parity or args.sync) and not args.precision:
        return _run("parity" if args.parity else "sync", args)
    from megarl.config.validate import check_config
    from megarl.launch.check import check_layouts_of
    from megarl.planner.precision import describe_precision

    env = Env.read()
    config = _load(args, env)
    if args.precision:
        print(describe_precision(config, check_config(config, env, command="check").model))
        return DONE
    return check_layouts_of(
        config, [text for text in args.layouts if "=" not in text], env, partial(_launch, env)
    )


def _launch(env: Env, config: Config, job: Job, command: str) -> int:
    """Run the ranks of a job, or this one if a launcher started it; returns the exit code."""
    if env.has_launcher:
        from megarl.launch.worker import run_external

        return run_external(config, env, command)
    if config.launch.topology == "split":
        from megarl.launch.run_split import run_split

        return run_split(config)
    from megarl.launch.spawn import spawn_ranks

    return spawn_ranks(config, job, command)


def _run(command: str, args: argparse.Namespace) -> int:
    from megarl.config.load import changed, load_config, run_dir
    from megarl.config.names import ENGINE_STAGES
    from megarl.launch.downloads import download_weights, resolve_datasets, resolve_model
    from megarl.launch.preflight import describe, preflight
    from megarl.launch.random_model import materialize_model
    from megarl.launch.run_config import check_resumed, make_run_dir

    env = Env.read()
    config = load_config(args.config, args.overrides)
    if command != "train":  # its own folder, beside the run's
        config = changed(config, "run", name=f"{config.run.name}-{command}")
    try:
        config = resolve_datasets(resolve_model(config, env), env)
        job = preflight(config, env, command=command)
        if not args.dry_run:
            download_weights(config, env, command)
            make_run_dir(config)
            config = materialize_model(config)
            if command == "train" and not args.resume_changed:
                check_resumed(config)
    except (ValueError, FileNotFoundError) as error:
        if env.has_launcher and env.is_main:  # torchrun turns every exit code into 1
            write_exit(run_dir(config), USER, Failure(0, USER, str(error), "start-up"))
        raise
    if env.is_main:
        for warning in job.warnings:
            print(f"megarl: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        print(describe(config, job))
        return DONE
    code = _launch(env, config, job, command)
    if code not in (DEFECT, STOPPED) and command == "train" and env.is_main:
        from megarl.telemetry.report import write_report

        try:
            if (
                config.stage in ENGINE_STAGES and job.model.bridge is None
            ):  # the planner needs a table
                is_split, world = config.launch.topology == "split", job.world
                _write_plan(
                    config,
                    world,
                    8 if is_split else env.local_world_size if env.has_launcher else world,
                )
            print(f"report: {write_report(run_dir(config))}")
        except FileNotFoundError:  # no step has finished
            pass
        except OSError as error:
            if code == DONE:  # otherwise the run has ended by it, and said so
                raise OSError(error.errno, error.strerror, str(run_dir(config))) from None
    return code


def _write_plan(config: Config, world: int, ranks_per_node: int) -> None:
    """Write the figures of the run's weight sync, for its report."""
    import json

    from megarl.config.load import changed, run_dir
    from megarl.planner.weight_sync import plan_weights
    from megarl.telemetry.report import PLAN

    ranks_per_node = config.launch.processes_per_node or ranks_per_node
    config = changed(config, "launch", processes=world, processes_per_node=ranks_per_node)
    (run_dir(config) / PLAN).write_text(json.dumps(plan_weights(config)[1]), encoding="utf-8")


def _report(args: argparse.Namespace) -> int:
    from megarl.telemetry.report import write_comparison, write_report

    for page in (
        [write_comparison(args.run_dirs)] if args.compare else map(write_report, args.run_dirs)
    ):
        print(f"report: {page}")
    return DONE


def _audit(args: argparse.Namespace) -> int:
    from megarl.telemetry.ledger import audit

    report = audit(args.run_dir)
    print(report)
    for problem in report.problems:
        print(f"megarl: {problem}", file=sys.stderr)
    return REFUSED if report.problems else DONE


def run() -> NoReturn:
    """The `megarl` command."""
    code = main()
    if Env.read().has_launcher:
        # as in launch.worker: the destructors of a process group whose peer is gone can hang or abort
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
