"""The faults themselves, on real processes and files of a run."""

import asyncio
import contextlib
import errno
import os
import random
import sqlite3
from pathlib import Path

from holdfast.chaos.processes import Action, Identity, Outcome, carry_out
from holdfast.errors import Mistake

__all__ = ["corrupt", "cut", "fill", "hurt"]

_SMALL_BYTES = 4 << 30
_CHUNK = 1 << 20
_GAP_S = 0.01


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
    """Flip one bit in a segment of shared memory; tells which."""
    segments = sorted(path for path in store.glob("s[0-9]*-[0-9]*"))
    if not segments:
        raise Mistake("`store: corrupt` needs a store in shared memory, with something in it")
    path = luck.choice(segments)
    with path.open("r+b") as file:
        used = [at for at, byte in enumerate(file.read(_CHUNK)) if byte]
        if not used:
            return f"{path.name} is empty"
        place = luck.choice(used)
        file.seek(place)
        byte = file.read(1)[0] ^ (1 << luck.randrange(8))
        file.seek(place)
        file.write(bytes([byte]))
    return f"{path.name} at {place}"


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
                    await asyncio.sleep(_GAP_S)
    finally:
        with contextlib.suppress(FileNotFoundError):
            balloon.unlink()
