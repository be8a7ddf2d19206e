"""Handlers of one run in this process, as several nodes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

Make = Callable[..., RendezvousHandler]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A handler tells its workers through the environment; the next test is none of them."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes handlers the way torchrun does; ends them after the test."""
    made: list[RendezvousHandler] = []

    def new(
        nnodes: tuple[int, int] = (2, 2), *, url: str = "", run: str = "r", **conf: str
    ) -> RendezvousHandler:
        given: dict[str, Any] = {"last_call_timeout": "0.05", "lease": "2", "timeout": 900, **conf}
        params = RendezvousParameters(
            "holdfast",
            url or f"sqlite:///{tmp_path}/ledger.db",
            run,
            *nnodes,
            local_addr="127.0.0.1",
            **given,
        )
        handler = get_rendezvous_handler(params)
        made.append(handler)
        return handler

    yield new
    for handler in made:
        handler.shutdown()
