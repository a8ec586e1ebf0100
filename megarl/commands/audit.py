"""`megarl audit RUN_DIR`: verifies that a run's ledger accounts for every prompt."""

import argparse
from pathlib import Path

from megarl.processes.exit_codes import DONE, REFUSED, say

NAME = "audit"
HELP = "balance a run's ledger: what became of every prompt; exit 3 if it does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="a run directory, e.g. runs/quickstart"
    )


def run(args: argparse.Namespace) -> int:
    from megarl.telemetry.audit import audit

    report = audit(args.run_dir)
    print(report)
    for problem in report.problems:
        say(problem)
    if report.problems:
        return REFUSED
    return DONE
