"""`megarl convert SRC DST --to FORMAT`: converts a checkpoint to another format (conversion.py)."""

import argparse
from pathlib import Path

from megarl.commands.arguments import size
from megarl.platform.env import is_interactive

NAME = "convert"
HELP = "HF model <-> Megatron distributed checkpoint, streamed and verified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="HF model, Megatron checkpoint or a run's step_<n>"
    )
    parser.add_argument(
        "target", metavar="DST", type=Path, help="a new folder; an interrupted conversion resumes"
    )
    parser.add_argument("--to", required=True, choices=("megatron", "hf"), help="format of DST")
    for name, axis in (("tp", "tensor ranks"), ("pp", "pipeline stages"), ("ep", "expert ranks")):
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=size,
            default=1,
            help=f"number of {axis} (1); any layout loads it",
        )
    parser.add_argument(
        "--config",
        metavar="DIR",
        type=Path,
        help="the HF model's folder, if SRC has no config.json",
    )
    parser.add_argument(
        "--export-format", choices=("bf16", "same"), default="bf16", help="as in a run's config"
    )
    parser.add_argument(
        "--file-gb", metavar="GB", type=float, help="maximum file size; default: as for export_hf"
    )


def run(args: argparse.Namespace) -> None:
    from megarl.checkpoint.hf_files import FILE_BYTES
    from megarl.commands.conversion import run_convert
    from megarl.layout import Parallel

    file_bytes = FILE_BYTES
    if args.file_gb is not None:
        file_bytes = int(args.file_gb * 1e9)
    summary = run_convert(
        args.source,
        args.target,
        args.to,
        Parallel(tensor=args.tp, pipeline=args.pp, expert=args.ep),
        config=args.config,
        file_bytes=file_bytes,
        interactive=is_interactive(),
        export_format=args.export_format,
    )
    print(summary)
