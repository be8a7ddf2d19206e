"""The faults themselves, on real processes and files of a run."""

import asyncio
import contextlib
import errno
import mmap
import os
import random
import sqlite3
from pathlib import Path

import numpy as np

from holdfast import transfer
from holdfast.chaos.processes import Action, Identity, Outcome, carry_out
from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS

__all__ = ["corrupt", "cut", "fill", "hurt"]

_SMALL_BYTES = 4 << 30
_CHUNK = 1 << 20


async def hurt(victim: Identity, name: str, *, pause_s: float = 0.0) -> bool:
    """Kill a process, or stop it for a while. False if it had ended."""
    action = Action(0.0, "pause" if pause_s else "kill", name, pause_s)
    outcomes: list[Outcome] = []
    await carry_out([action], lambda _: victim, outcomes.append)
    return bool(outcomes) and outcomes[0].result == "done"


async def cut(ledger: Path, length_s: float) -> None:
    """Hold the ledger's file, so that nobody can write to it."""
    try:
        held = sqlite3.connect(
            f"file:{ledger}?mode=rw", uri=True, timeout=30.0, isolation_level=None,
            check_same_thread=False,
        )  # fmt: skip
    except sqlite3.OperationalError as error:
        text = f"`ledger: cut` is for a ledger in the run's folder (sqlite): {error}"
        raise Mistake(text) from None
    try:
        await asyncio.to_thread(held.execute, "BEGIN IMMEDIATE")
        await asyncio.sleep(length_s)
        held.execute("ROLLBACK")
    finally:
        held.close()


def corrupt(store: Path, luck: random.Random) -> str:
    """Flip one bit of a value that lies in shared memory, as a bad memory chip does; says which.

    Of a value, not of what the store keeps about values: a store that has lost its own books
    cannot know what it has lost.
    """
    with transfer.connect(f"shm://{store.name}") as opened:
        keys = [one.key for one in opened.scan()]
        if not keys:
            raise Mistake("`store: corrupt` needs a store with something in it")
        key = luck.choice(sorted(keys))
        value = np.asarray(opened.get([key])[key])
    data = value.tobytes()
    for path in sorted(store.glob("s[0-9]*-[0-9]*")):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(data)
            if at >= 0:
                place = at + luck.randrange(len(data))
                memory[place] ^= 1 << luck.randrange(8)
                return f"{key}, byte {place - at}"
    raise Mistake(f"{key} was gone before it could be damaged")


async def fill(folder: Path, length_s: float) -> None:
    """Leave no room on the run's file system, which must be a small one."""
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize > _SMALL_BYTES:
        raise Mistake(
            f"`disk: full` would fill {free.f_bavail * free.f_frsize >> 30} GiB: put the run on "
            "a small file system (mount -t tmpfs -o size=500m)"
        )
    balloon = folder / ".balloon"
    try:
        with balloon.open("wb") as file:
            until = asyncio.get_running_loop().time() + length_s
            while asyncio.get_running_loop().time() < until:
                try:
                    os.write(file.fileno(), bytes(_CHUNK))
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    await asyncio.sleep(DEFAULTS.chaos_refill_s)
    finally:
        with contextlib.suppress(FileNotFoundError):
            balloon.unlink()
