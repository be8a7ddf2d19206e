"""A `child.py` that came out of a fork server: its line is standard input, and all is imported."""

import os
import sys

from holdfast.launch import child

__all__ = ["main"]


def main() -> None:
    """Wait for one order, then become it."""
    line = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    child.main(line, sys.argv[1:])
