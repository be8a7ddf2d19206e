"""A server as vLLM is one: processes that go on when their parent is killed, and what they leave.

`python tree_child.py FILE` writes a line when all run: its shared memory, the folder of its
sockets, and the pids of all three, itself first. The two below ignore every signal that can be
ignored.
"""

import os
import signal
import socket
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path


def main(file: Path) -> None:
    """Start a child with a child, and wait."""
    memory = SharedMemory(create=True, size=4096)
    place = os.environ["VLLM_RPC_BASE_PATH"]
    socket.socket(socket.AF_UNIX).bind(f"{place}/line")
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
        out.write(f"/dev/shm/{memory.name} {place} {os.getpid()} {pids.decode()}\n")
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
