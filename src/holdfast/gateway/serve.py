"""`holdfast serve`: gateways and a host, started and restarted by one process.

Everything that it starts dies with it; what they knew is in the ledger, so starting it again
goes on where it was. A process that dies is started again at once, then more and more slowly. One
that ends again and again by the same error of its own ends the service, with that error.
"""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast import events
from holdfast.jobs.serving import SETTINGS
from holdfast.proc import supervisor
from holdfast.proc.forkserver import ForkServer

__all__ = ["Part", "own_name", "watch"]


class Restarted(events.Event, frozen=True, tag="serve.restarted"):
    """A part died and was started again."""

    labels = ("part",)

    part: str
    code: int


class Part(supervisor.Part):
    """A program of ours that reads its settings from its environment, kept alive."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: msgspec.Struct,
        log: Path,
        forks: ForkServer | None = None,
        **how: Any,
    ) -> None:
        """`how` are the words of any part (`supervisor.Part`)."""
        super().__init__(
            name,
            [sys.executable, "-m", module],
            env={SETTINGS: msgspec.json.encode(settings).decode()},
            log=log,
            forks=forks,
            **how,
        )


def watch(
    parts: Sequence[Part],
    say: Callable[[str], None],
    ready: Callable[[], bool],
    announce: Callable[[], None],
) -> None:
    """Start everything, say when it is ready, and keep it alive until a signal comes."""
    told = False

    def died(part: supervisor.Part, code: int) -> bool:
        if not part.given_up:
            events.emit(Restarted(part=part.name, code=code))
            say(f"{part.name} ended with code {code}; starting it again{part.last_words}")
        return False

    def meanwhile() -> None:
        nonlocal told
        if not told and ready():
            told = True
            announce()

    supervisor.Supervisor(parts, died=died, say=say).run(meanwhile)


def own_name() -> str:
    """A name that no other process uses: a host is known by it."""
    return f"{os.uname().nodename.split('.')[0].lower()[:40]}-{secrets.token_hex(3)}"
