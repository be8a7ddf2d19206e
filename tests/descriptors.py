"""What this process holds open, of what a test itself has made.

The number of all descriptors says nothing of a test: what earlier tests left to the garbage
collector is closed while it runs.
"""

import contextlib
from pathlib import Path


def held_below(folder: Path) -> list[str]:
    """The files and folders that this process holds open in a folder, and the folder itself."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            path = str(one.readlink()).removesuffix(" (deleted)")
            if Path(path).is_relative_to(folder.resolve()):
                found.append(path)
    return sorted(found)
