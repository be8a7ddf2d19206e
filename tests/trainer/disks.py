"""A disk of the test's own, small enough to be filled."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["full", "small"]


@contextlib.contextmanager
def small(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes in this new folder."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("only root may mount a tmpfs")
    folder.mkdir()
    size = f"size={size_bytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Leave no room, not for one page."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    try:
        yield
    finally:
        ballast.unlink()
