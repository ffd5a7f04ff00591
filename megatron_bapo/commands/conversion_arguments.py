"""Arguments that the conversion tools share. Without torch, which --help does not need."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

_DEFAULT_GIB = 4


def add_output_arguments(parser: argparse.ArgumentParser, written: str = "Hugging Face folder to write") -> None:
    """Add --output and --max-file-gib, which becomes `max_file_bytes`."""
    parser.add_argument("--output", type=Path, required=True, help=written)
    parser.add_argument(
        "--max-file-gib",
        type=_bytes,
        default=_DEFAULT_GIB * 2**30,
        metavar="N",
        dest="max_file_bytes",
        help=f"file size limit (default {_DEFAULT_GIB})",
    )


def _bytes(text: str) -> int:
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a size; give a number above 0")
    return int(gib * 2**30)
