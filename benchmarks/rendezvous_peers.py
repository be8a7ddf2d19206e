"""A process with some of the participants of `rendezvous.py`, others': threads that block.

Runs in the environment of the peers (scripts/setup-peers rendezvous), which has no Holdfast:
`python -m benchmarks.rendezvous_peers`. Answers the orders of `rendezvous_child.py`. In all of
them `prepare` connects, so that the clock of `go` starts with everybody's connections open.
The first process is also the host of the store, or of the lighthouse.

    c10d         torch's dynamic rendezvous, through the handler that torchrun uses
    nvrx         NVRx's handler, through the one that ft_launcher uses
    lighthouse   torchft's; the clock stops when the members are known, ranks are counted later
"""

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

TIMEOUT_S = 300
_TORCH = "torch.distributed.elastic"
_NVRX = "nvidia_resiliency_ext.fault_tolerance"


class Handlers:
    """Participants that are `RendezvousHandler`s on a TCPStore."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._handlers = [
            self._handler(order, index)
            for index in range(order["first"], order["first"] + order["here"])
        ]

    def _handler(self, order: dict[str, Any], index: int) -> Any:
        nvrx = order["kind"] == "nvrx"
        root = f"{_NVRX}._torch_elastic_compat" if nvrx else _TORCH
        handlers = f"{_NVRX}._ft_rendezvous" if nvrx else f"{root}.rendezvous.dynamic_rendezvous"
        backends = importlib.import_module(f"{root}.rendezvous.c10d_rendezvous_backend")
        parameters = importlib.import_module(f"{root}.rendezvous.api").RendezvousParameters(
            backend="c10d",
            endpoint=order["where"],
            run_id=order["run"],
            min_nodes=order["nodes"],
            max_nodes=order["nodes"],
            local_addr="127.0.0.1",
            is_host=str(index == 0),
            join_timeout=TIMEOUT_S,
        )
        backend, store = backends.create_backend(parameters)
        return importlib.import_module(handlers).create_handler(store, backend, parameters)

    def go(self) -> Iterator[Callable[[], int]]:
        """One call per participant, which returns its rank."""
        for handler in self._handlers:
            yield lambda handler=handler: _rank(handler.next_rendezvous())  # type: ignore[misc]

    def leave(self) -> None:
        """Stop their heartbeats, and close what they have met in."""
        for handler in self._handlers:
            handler._stop_heartbeats()
        for handler in self._handlers[:1]:
            handler.shutdown()
        self._handlers.clear()


def _rank(met: Any) -> int:
    """torch gives an object, NVRx a tuple."""
    return int(met[1] if isinstance(met, tuple) else met.rank)


class Lighthouse:
    """Participants that ask torchft's lighthouse for a quorum."""

    def __init__(self, order: dict[str, Any]) -> None:
        rust = importlib.import_module("torchft._torchft")
        self._server = None
        if order["first"] == 0:
            self._server = rust.LighthouseServer(bind=order["where"], min_replicas=order["nodes"])
        limit = timedelta(seconds=TIMEOUT_S)
        url = f"http://{order['where']}"
        self._names = [
            f"node-{index:05d}" for index in range(order["first"], order["first"] + order["here"])
        ]
        self._clients = [rust.LighthouseClient(url, limit) for _ in self._names]
        self._limit = limit

    def go(self) -> Iterator[Callable[[], Any]]:
        """One call per participant, which returns what its rank can be counted from."""
        for client, name in zip(self._clients, self._names, strict=True):
            yield lambda client=client, name=name: (  # type: ignore[misc]
                name,
                client.quorum(name, self._limit),
            )

    def leave(self) -> None:
        """Close."""
        self._clients.clear()
        if self._server is not None:
            self._server.shutdown()


def _counted(found: Any) -> int:
    """The rank among the members of a quorum."""
    if isinstance(found, int):
        return found
    name, quorum = found
    return sorted(member.replica_id for member in quorum.participants).index(name)


class Meeting:
    """The participants of one turn, each in a thread that waits for `go`."""

    def __init__(self, there: Handlers | Lighthouse) -> None:
        self._there = there
        self._found: list[Any] = []
        self._troubles: list[str] = []
        self._start = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(act,), daemon=True) for act in there.go()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        self._start.wait()
        try:
            self._found.append(act())
        except Exception as error:  # noqa: BLE001 -- whatever a peer says is told to the parent
            self._troubles.append(f"{type(error).__name__}: {error}")

    def go(self) -> dict[str, Any]:
        """All at once; returns when the last one is through."""
        self._start.set()
        for thread in self._threads:
            thread.join()
        at = time.monotonic()
        ranks = [_counted(one) for one in self._found]
        return {"at": at, "ranks": ranks, "trouble": "; ".join(self._troubles[:1])}

    def leave(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):
            self._there.leave()


def main() -> None:
    """Serve until there are no more orders."""
    there: Meeting | None = None
    # Peers log to the standard output; it is ours to answer on.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "prepare":
            lighthouse = order["kind"] == "lighthouse"
            there = Meeting(Lighthouse(order) if lighthouse else Handlers(order))
        elif order["do"] == "go":
            assert there is not None
            answer = there.go()
        elif there is not None:
            there.leave()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
