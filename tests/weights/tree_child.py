"""A server as vLLM is one: processes that go on when their parent is killed.

`python tree_child.py FILE` writes a line with the pids of all three when they run. The two below
ignore every signal that can be ignored.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(file: Path) -> None:
    """Start a child with a child, and wait."""
    read, write = os.pipe()
    if os.fork() == 0:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.fork()
        os.write(write, f"{os.getpid()} ".encode())
        time.sleep(600)
        return
    pids = b""
    while pids.count(b" ") < 2:
        pids += os.read(read, 100)
    with file.open("a") as out:
        out.write(f"{os.getpid()} {pids.decode()}\n")
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
