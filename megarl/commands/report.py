"""`megarl report RUN_DIR`: draws the metric curves of one or several runs."""

import argparse
from pathlib import Path

NAME = "report"
HELP = "draw the curves of runs: report.png and report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        action="store_true",
        help="draw the runs together: compare.html beside the first",
    )
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        type=Path,
        help="a run directory, e.g. runs/quickstart",
    )


def run(args: argparse.Namespace) -> None:
    from megarl.telemetry.report import write_comparison, write_report

    if args.compare:
        print(f"report: {write_comparison(args.run_dirs)}")
        return
    for folder in args.run_dirs:
        print(f"report: {write_report(folder)}")
