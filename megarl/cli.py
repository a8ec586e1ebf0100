"""The command line: parses arguments, runs a command, returns the exit code.

Each command is a module of commands/; exit codes are listed in processes/exit_codes.py. Work that
needs torch runs in the ranks.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import megarl
from megarl.commands import (
    audit,
    check,
    convert,
    evaluate,
    explain,
    plan,
    report,
    serve_reward,
    train,
)
from megarl.platform.env import Env, clean_logs, get_env, log_text
from megarl.processes.exit_codes import DONE, REFUSED, STOPPED, USER, classify, leave
from megarl.processes.files import full_disk

DESCRIPTION = "Reinforcement learning for language models: Megatron-Core trains, vLLM samples."
EPILOG = """\
A config is a YAML file; section.key=value arguments override its values:
  megarl train configs/quickstart.yaml train.steps=20 parallel.tensor=2
On several nodes, start the same command with torchrun
(scripts/torchrun_multinode.sh, scripts/slurm.sbatch).
"""


# modules with NAME, HELP, add_arguments(parser), and run(args) -> exit code or None (DONE)
COMMANDS = (train, evaluate, plan, check, explain, report, audit, convert, serve_reward)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: sys.argv); returns its exit code."""
    clean_logs()
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-") or "=" not in text:
            parser.error(f"unknown argument {text}")
    # key=value overrides may follow options
    args.overrides = [*args.overrides, *rest, *(text for text in args.layouts if "=" in text)]
    try:
        return args.run(args) or DONE
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # the reader closed the pipe: `megarl plan ... | head`
        # without stdout, Python flushes nothing at exit
        sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]
        return DONE
    except Exception as error:
        full = ""
        if isinstance(error, OSError):
            full = full_disk(error, Path(error.filename or "."))
        code = REFUSED if full else classify(error)
        if code not in (USER, REFUSED):
            raise
        if full or get_env("RANK", "0") == "0":
            print(f"megarl: {full or log_text(' '.join(str(error).split()))}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megarl",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        added = subparsers.add_parser(command.NAME, help=command.HELP)
        added.set_defaults(
            run=command.run, overrides=[], layouts=[], dry_run=False, resume_changed=False
        )
        command.add_arguments(added)
    return parser


def run() -> NoReturn:
    """Entry point of the `megarl` script: runs the command and exits with its exit code."""
    # if the shell ignores SIGCHLD (trap '' CHLD), every child would appear to exit with status 0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = main()
    if Env.read().has_launcher:
        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
