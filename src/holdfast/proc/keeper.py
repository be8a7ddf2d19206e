"""A process that leads a group, runs one program in it, and ends the group when that has ended.

    python -I keeper.py PARENT_PID FOLDER PROGRAM [ARG ...]

For servers of several processes, whose others stay when the first is killed. Started by path,
with the standard library only and a bare interpreter: it lives as long as the server does.
FOLDER, and the shared memory that the group has mapped under the names that Python gives, go
with the group.

SIGHUP comes from the kernel when our parent has ended. A SIGTERM to the group is for the
program: it is handled here, because what is ignored would be ignored by the program as well.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator


def shared() -> Iterator[str]:
    """The shared memory that processes of this group have mapped."""
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 -- starts faster without
        try:
            if os.getpgid(int(name)) == os.getpgrp():
                with open(f"/proc/{name}/maps") as lines:  # noqa: PTH123
                    for line in lines:
                        path = line.rstrip().rpartition(" ")[2]
                        if path.startswith("/dev/shm/psm_"):  # noqa: S108 -- Python's own name
                            yield path
        except OSError:
            pass


def end(*_: object) -> None:
    """Remove what the group has left, and end it, this process included."""
    try:
        for path in {*shared()}:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
    finally:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the program, and end the group after it."""
    signal.signal(signal.SIGHUP, end)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGHUP)
    if os.getppid() != int(sys.argv[1]):
        end()
    try:
        code = subprocess.call(sys.argv[3:])
        print(f"keeper: {sys.argv[3]} ended with code {code}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        end()


if __name__ == "__main__":
    main()
