"""The store that torch's agent is given for one cycle.

Rank 0's agent hosts a `TCPStore`, new in every cycle and on a port of its own, for agents and
workers alike. So nothing of an old cycle can be read in a new one, and when its host dies, one
cycle dies with it and nothing else.

torch's agent asks a store for two things, and both would hang when the wrong node dies in the
wrong moment. `AgentStore` is the store with these two mended:

- **Giving ranks.** Every agent writes how many workers it has, rank 0 adds up, everybody reads.
  When a node dies in between, its agent's answer never comes; torch would wait for 5 minutes and
  then give up its node. Here the wait ends with the cycle, and the agent is told what it would
  have been told if all nodes were like its own. It starts workers that find nobody to talk to,
  asks whether nodes are waiting, and comes back for the next cycle.
- **The exit barrier.** An agent enters it if and only if all of its workers have succeeded; there
  is no other sign of that. So entering it is what records the success, and leaving it means that
  the whole run has succeeded: no fixed 300 seconds, and no store that must outlive the others.

Calls into torch's store may block for ever when its host is stopped (a pause, a cut cable), so
they are made in a thread that is left behind when the cycle is over.
"""

import concurrent.futures
import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

# torch exports the stores without saying so.
from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from holdfast.timeouts import DEFAULTS

__all__ = ["AgentStore", "Over", "host", "reach"]

T = TypeVar("T")

_STORE_S = timedelta(seconds=300)
_REACH_S = timedelta(seconds=30)
_ROLE = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_TERMINAL = "torchelastic/agent/terminal_state"


class Over(Exception):  # the end of a wait; it never leaves this package
    """The cycle was over before the store had answered."""


class Course(Protocol):
    """What a store needs to know about its cycle."""

    def stale(self) -> bool:
        """Whether the cycle is over."""

    def finish(self) -> None:
        """All workers of this node have succeeded."""

    def wait_for_end(self) -> None:
        """Wait until the run has succeeded. Raises when the cycle ends otherwise."""


def host(address: str, listener: socket.socket) -> TCPStore:
    """Serve the cycle's store on a socket, which belongs to it from now on.

    It is served until the last reference to what this returns is gone. So only the handler holds
    it; the agent, and calls that are left behind, use a connection to it (`reach`).
    """
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=_STORE_S,
    )


def reach(address: str, port: int, stale: Callable[[], bool]) -> TCPStore:
    """Connect to the cycle's store. Raises `Over`, or torch's own error after a minute."""

    def connect() -> TCPStore:
        store = TCPStore(address, port, wait_for_workers=False, timeout=_REACH_S)
        store.set_timeout(_STORE_S)
        return store

    return _until(stale, connect)


class AgentStore(PrefixStore):
    """The store of one cycle, as one agent sees it. Serves the agent's own thread only."""

    def __init__(self, store: TCPStore, rank: int, nodes: int, course: Course) -> None:
        super().__init__("holdfast", store)
        self._rank = rank
        self._nodes = nodes
        self._course = course
        self._own: dict[str, Any] = {}
        self._gone = False

    def set(self, key: str, value: Any) -> None:
        """See torch's `Store`. What this agent says of itself is remembered."""
        if key.startswith(_ROLE):
            self._own = json.loads(value)
        plain = super().set
        self._ask(lambda: plain(key, value), lambda: None)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """See torch's `Store`."""
        plain = super().multi_set  # type: ignore[misc]
        self._ask(lambda: plain(keys, values), lambda: None)

    def get(self, key: str) -> bytes:
        """See torch's `Store`; the ranks of a cycle that is over are made up."""
        plain = super().get
        return self._ask(lambda: plain(key), self._made_up) if self._knows(key) else plain(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See torch's `Store`; in a cycle that is over all nodes are like this one."""
        plain = super().multi_get
        if not keys or not self._knows(keys[0]):
            return plain(keys)
        return self._ask(
            lambda: plain(keys),
            lambda: [
                json.dumps({**self._own, "rank": rank}).encode() for rank in range(len(keys))
            ],
        )

    def add(self, key: str, amount: int) -> int:
        """See torch's `Store`; entering the exit barrier records success."""
        if not key.startswith(_TERMINAL):
            return int(super().add(key, amount))
        self._course.finish()
        return 0  # nobody is the last: who has finished is in the ledger

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """See torch's `Store`; the exit barrier opens when the run has succeeded."""
        if keys and keys[0].startswith(_TERMINAL):
            self._course.wait_for_end()
        else:
            super().wait(keys, *timeout)

    def _knows(self, key: str) -> bool:
        return bool(self._own) and key.startswith((_ROLE, _ASSIGNED))

    def _made_up(self) -> bytes:
        slots = self._own["local_world_size"]
        first, world = self._rank * slots, self._nodes * slots
        return json.dumps([first, world, first, world]).encode()

    def _ask(self, call: Callable[[], T], instead: Callable[[], T]) -> T:
        if self._gone:
            return instead()
        try:
            return _until(self._course.stale, call)
        except (Over, DistNetworkError):
            self._gone = True  # a call may still hold the connection: no other is made
            return instead()


def _until(stale: Callable[[], bool], call: Callable[[], T]) -> T:
    """Make a call that may block for ever; raises `Over` when the cycle ends before it does."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  whoever waits gets it, whatever it is
            answer.set_exception(error)

    threading.Thread(target=work, name="holdfast-store", daemon=True).start()
    while not concurrent.futures.wait([answer], DEFAULTS.torchrun_poll_s).done:
        if stale():
            raise Over
    return answer.result()
