"""A trainer of several nodes on one machine: the ranks' agents, and spares that wait to step in.

Each node is `holdfast launch` with one worker. A node that dies costs one cycle: a spare, whose
interpreter has everything imported, takes its rank, and the node is started again as a spare.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from holdfast import proc
from holdfast.proc.forkserver import ForkServer, inherit

__all__ = ["keep"]

_POLL_S = 0.05
_REST_S = 1.0
"""Between two starts of a node that does not stay."""
_MAX_QUICK = 20
_QUICK_S = 5.0


class _Node:
    def __init__(self, name: str, argv: Sequence[str], forks: ForkServer | None) -> None:
        self.name = name
        self._argv = argv
        self._forks = forks
        self.child: proc.Child | None = None
        self._began = 0.0
        self.quick = 0

    def look(self) -> int | None:
        """Start it if it is not there; returns the code that it has ended with by itself."""
        now = time.monotonic()
        if self.child is None:
            if now - self._began >= (_REST_S if self.quick else 0.0):
                self._began = now
                forked = self._forks.spawn(self._argv, name=self.name) if self._forks else None
                self.child = forked or proc.spawn(self._argv, name=self.name)
            return None
        if self.child.alive():
            return None
        code = self.child.wait(1.0)
        self.child.kill_group()
        self.child = None
        self.quick = self.quick + 1 if now - self._began < _QUICK_S else 0
        return None if code < 0 and self.quick < _MAX_QUICK else code


def keep(commands: Sequence[Sequence[str]], grace_s: float = 5.0) -> int:
    """Keep nodes alive until one of them ends by itself, or a signal comes; returns its code."""
    forks = inherit()
    if forks is not None:
        forks.wait(_REST_S)
    nodes = [_Node(f"node {at}", argv, forks) for at, argv in enumerate(commands)]
    asked: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        while not asked:
            for node in nodes:
                code = node.look()
                if code is not None:
                    return code
            time.sleep(_POLL_S)
        return 0
    finally:
        _each(nodes, lambda child: child.signal(signal.SIGTERM))
        until = time.monotonic() + grace_s
        _each(nodes, lambda child: _wait(child, until - time.monotonic()))
        if forks is not None:
            forks.close()


def _each(nodes: Sequence[_Node], act: Callable[[proc.Child], object]) -> None:
    for node in nodes:
        if node.child is not None:
            act(node.child)


def _wait(child: proc.Child, seconds: float) -> None:
    with contextlib.suppress(Exception):
        child.wait(max(0.0, seconds))
    child.kill_group()
