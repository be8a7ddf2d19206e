"""Connections to one Redis server, and those whose last request must not come true any more.

A request whose answer was lost may still be on its way: the server may carry it out after
we have sent a newer one on another connection. So a connection that was lost during a
change is *doomed*: the server is told, on a new connection, to end it (CLIENT KILL), and
no further change is sent until that is done. Redis carries out one command at a time, so
after the answer the old request has been carried out, or never will be. The connection is
named by number and address, because a restarted server counts anew.

Where the server's rules forbid CLIENT KILL, this protection is missing.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import Denied, Unavailable
from holdfast.transfer.resp import Address, Lost, Refused, Wire, command

__all__ = ["Pool"]

MOST_CONNECTIONS = 16


class Pool:
    """Connections, at most so many at once. May be used from several threads."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()  # after a fork, another thread may have held it
        self._pid = os.getpid()
        self._idle: list[Wire] = []
        self._doomed: list[tuple[str, str]] = []
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    @contextmanager
    def reading(self) -> Iterator[Wire]:
        """A connection for questions. Raises `Unavailable`, also when it is lost."""
        with self._connection() as wire:
            try:
                yield wire
            except BaseException as error:
                self._drop(wire)
                if isinstance(error, Lost):
                    raise Unavailable(f"Redis did not answer: {error}") from error
                raise

    @contextmanager
    def changing(self) -> Iterator[Wire]:
        """A connection for changes; if it is lost, its last one is stopped or done.

        Raises `Unavailable` before anything is sent; `Lost` goes through.
        """
        self.bury()
        try:
            with self._connection() as wire:
                try:
                    yield wire
                except BaseException:
                    with self._lock:
                        self._doomed.append(wire.identity)
                    self._drop(wire)
                    raise
        except BaseException:
            with contextlib.suppress(Unavailable, Denied):  # it is tried again before a change
                self.bury()
            raise

    def bury(self) -> None:
        """End what is doomed. Raises `Unavailable` as long as that is not certain."""
        if not self._doomed:
            return
        with self._lock:
            doomed = list(self._doomed)
        with self.reading() as wire:
            for identity in doomed:
                number, address = identity
                request = command("CLIENT", "KILL", "ID", number, "ADDR", address)
                answer = wire.ask([request])[0] if number else 0
                if isinstance(answer, Refused) and answer.code != "NOPERM":
                    raise Unavailable(f"Redis would not end an old connection: {answer}")
                with self._lock, contextlib.suppress(ValueError):
                    self._doomed.remove(identity)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    @contextmanager
    def _connection(self) -> Iterator[Wire]:
        if os.getpid() != self._pid:
            self._reset()  # the connections are our parent's
        free = self._free
        if not free.acquire(timeout=self._timeout_s):
            raise Unavailable(
                f"all {MOST_CONNECTIONS} connections to {self.address.host} are in use"
            )
        try:
            wire = self._take()
            yield wire
            with self._lock:
                self._idle.append(wire)
        finally:
            free.release()

    def _take(self) -> Wire:
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return Wire(self.address, self._timeout_s)
            if wire.quiet():
                return wire
            wire.close()

    def _drop(self, wire: Wire) -> None:
        """Hang up, and on the idle ones too: what broke one has mostly broken all."""
        wire.close()
        self.close()
