"""The nodes of one run as handlers in this process, called as torch's agent calls them."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from holdfast import ledger
from holdfast.contrib.torchrun.handler import HoldfastHandler
from holdfast.ledger.records import decode
from holdfast.ledger.sync import SyncLedger
from holdfast.rendezvous.records import Cycle, Keys
from patience import HANG_S

KEYS = Keys("r")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A handler tells its workers through the environment; the next test is none of them."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def behind(call: Any, *args: Any) -> "Future[Any]":
    """Make a call in a thread that nobody has to wait for."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def meet(*handlers: HoldfastHandler) -> list[RendezvousInfo]:
    """All call `next_rendezvous` at once; the answers in their order."""
    answers = [behind(handler.next_rendezvous) for handler in handlers]
    return [answer.result(HANG_S) for answer in answers]


class Run:
    """One run; its handlers are shut down after the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.handlers: list[HoldfastHandler] = []

    def node(
        self, nnodes: tuple[int, int] = (2, 2), *, url: str = "", run: str = "r", **conf: Any
    ) -> HoldfastHandler:
        """A handler, made the way torchrun does."""
        given = {"last_call_timeout": "0.05", "lease": "2", "timeout": 900, **conf}
        params = RendezvousParameters(
            "holdfast", url or self.url, run, *nnodes, local_addr="127.0.0.1", **given
        )
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, HoldfastHandler)
        self.handlers.append(handler)
        return handler

    def two(self, **conf: Any) -> tuple[list[HoldfastHandler], list[RendezvousInfo]]:
        """Two nodes that have met, and their places, both by rank."""
        handlers = [self.node(**conf) for _ in range(2)]
        infos = meet(*handlers)
        order = sorted(range(2), key=lambda at: infos[at].rank)
        return [handlers[at] for at in order], [infos[at] for at in order]

    def spare(self, **conf: Any) -> "Future[Any]":
        """One more node, which waits for a place."""
        return behind(self.node(**conf).next_rendezvous)

    def ledger(self) -> SyncLedger:
        """Where the run is recorded."""
        return ledger.open_sync(self.url)

    def cycle(self) -> Cycle:
        """The run's record."""
        with self.ledger() as opened:
            entry = opened.get(KEYS.cycle)
        assert entry is not None
        return decode(Cycle, entry)

    def why(self) -> str:
        """Why the last cycle ended."""
        return str(self.cycle().cause)


@pytest.fixture
def run(url: str) -> Iterator[Run]:
    """A run on sqlite."""
    one = Run(url)
    yield one
    for handler in one.handlers:
        handler.shutdown()
