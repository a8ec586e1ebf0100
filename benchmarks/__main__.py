"""`python -m benchmarks [NAME ...]`: times parts of megarl beside other software; without a name, lists them."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import algorithms, plans, ranks512
from benchmarks.run import bench, describe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="for example: advantages losses")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run only the cases whose name contains TEXT"
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=3,
        help="fresh processes per contender (default: 3)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure to FILE")
    args = parser.parse_args()
    if not args.names:
        print(describe())
        return 0
    if args.names == ["plans"]:  # compared with limits, not with other software
        return 0 if plans.check(only=args.only, json_file=args.json) else 3
    if args.names == ["ranks512"]:
        return 0 if ranks512.check(json_file=args.json) else 3
    if args.names == ["algorithms"]:
        algorithms.run(args.only, args.rounds, args.json)
        return 0
    return 0 if bench(args.names, only=args.only, rounds=args.rounds, json_file=args.json) else 3


if __name__ == "__main__":
    raise SystemExit(main())
