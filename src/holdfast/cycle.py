"""For training code: do something within this worker's cycle, or not at all.

    holdfast.cycle.commit({"checkpoint": "ckpt/cycle_3/step_40.pt"})
    holdfast.cycle.committed("checkpoint")

A worker that was stopped, and wakes up when others have taken over, can still compute and write
files. What it cannot do is `commit`: that is one transaction that compares the cycle, and raises
`Fenced` when the cycle is over. So a checkpoint is written below a path of its own (name the cycle
in it) and exists once it is committed; whoever resumes reads `committed`.

`guard()` is the comparison itself, for transactions of your own.
"""

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import Fenced, Mistake, UnknownOutcome
from holdfast.ledger.sync import SyncLedger, open_sync
from holdfast.ledger.types import Compare, Put, join
from holdfast.rendezvous.records import Keys
from holdfast.retry import Policy

__all__ = ["commit", "committed", "guard", "number"]

_AGAIN = Policy(attempts=3, base_s=0.0)

_lock = threading.Lock()
_open: dict[tuple[int, str], SyncLedger] = {}


def number() -> int:
    """The number of this worker's cycle; 0 outside of `holdfast launch`."""
    return int(os.environ.get("HOLDFAST_CYCLE", "0"))


def guard() -> Compare:
    """True, inside a transaction, as long as this worker's cycle runs."""
    revision = int(_variable("HOLDFAST_CYCLE_REVISION"))
    return Compare(Keys(_variable("HOLDFAST_RUN")).cycle, "mod", "==", revision)


def commit(values: Mapping[str, object]) -> int:
    """Record values (anything JSON can hold) by name, all or none; returns the revision.

    Raises `Fenced`, and changes nothing, when the cycle is over. Committing the same again does
    no harm. Where an answer was lost and the cycle ended at the same time, it is `Fenced` too,
    and the commit may have counted, as the last of its cycle: `committed` tells.
    """
    puts = [Put(_key(name), msgspec.json.encode(value)) for name, value in values.items()]
    # Sent again after a lost answer, it does the same, or finds the cycle over.
    txn = _AGAIN.call(lambda: _ledger().txn([guard()], puts), on=UnknownOutcome)
    if not txn.succeeded:
        raise Fenced(
            f"cycle {number()} of {_variable('HOLDFAST_RUN')} is over: this worker was replaced, "
            "and must end"
        )
    return txn.revision


def committed(name: str) -> Any:
    """What was committed under a name, in whichever cycle; None: nothing yet."""
    entry = _ledger().get(_key(name))
    return None if entry is None else msgspec.json.decode(entry.value)


def _key(name: str) -> str:
    return join("runs", _variable("HOLDFAST_RUN"), "commits", name)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise Mistake(f"{name} is not set: start this program with `holdfast launch`")
    return value


def _close(pid: int, opened: SyncLedger) -> None:
    if pid == os.getpid():  # what was inherited is the parent's
        with contextlib.suppress(RuntimeError):  # threads end before this is called
            opened.close()


def _ledger() -> SyncLedger:
    """One connection per process; a forked child makes its own."""
    place = os.getpid(), _variable("HOLDFAST_LEDGER")
    with _lock:
        if place not in _open:
            _open[place] = opened = open_sync(place[1])
            atexit.register(_close, place[0], opened)
        return _open[place]
