"""A process with some of the participants of `rendezvous.py`, ours: coroutines in one loop.

`python -m benchmarks.rendezvous_child`. It answers each order, a line of JSON, with a line of
JSON:

    prepare   open the ledger and make the participants; nothing is sent yet
    go        all of them enter at once; when the last one knows its rank, say when that was
    end       leave

`count`: participants also count what they ask of the ledger, and what it tells them.
`profile`: a file for cProfile's figures of `go`.
"""

import asyncio
import cProfile
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from holdfast import ledger
from holdfast.errors import LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger import Ledger
from holdfast.ledger.base import Watch
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Batch, Compare, Entry, Lease, LeaseInfo, Op, Page, Txn
from holdfast.rendezvous.records import Node, Rules
from holdfast.rendezvous.rendezvous import Rendezvous


class Counting(Ledger):
    """A ledger as one participant uses it, and how often it does."""

    def __init__(self, inner: Ledger) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    async def start(self) -> None:
        """It is open."""

    async def close(self) -> None:
        """It is somebody else's."""

    async def _get(self, key: str) -> Entry | None:
        self.calls["get"] += 1
        return await self._inner._get(key)

    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        self.calls["range"] += 1
        return await self._inner._page(prefix, after, limit, revision)

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        self.calls["txn"] += 1
        return await self._inner._txn(compare, then, otherwise)

    async def _grant(self, ttl_s: float) -> Lease:
        self.calls["grant"] += 1
        return await self._inner._grant(ttl_s)

    async def keep_alive(self, lease: int) -> float:
        """Not counted: it comes with time, not with a rendezvous."""
        return await self._inner.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """After the clock."""
        await self._inner.revoke(lease)

    async def lease_info(self, lease: int) -> LeaseInfo:
        """Not used."""
        return await self._inner.lease_info(lease)

    async def leases(self) -> tuple[int, ...]:
        """Not used."""
        return await self._inner.leases()

    def _watch(self, prefix: str, start: int) -> Watch:
        self.calls["watch"] += 1
        return _Heard(self._inner._watch(prefix, start), self.calls)

    async def compact(self, revision: int) -> None:
        """Not used."""
        await self._inner.compact(revision)


class _Heard(Watch):
    def __init__(self, inner: Watch, calls: Counter[str]) -> None:
        self._inner, self._calls = inner, calls

    async def __anext__(self) -> Batch:
        batch = await anext(self._inner)
        self._calls["pushed"] += 1
        return batch

    async def aclose(self) -> None:
        await self._inner.aclose()


class Participant:
    """One node, as its agent would be: whoever loses its lease enters anew."""

    def __init__(self, led: Ledger, order: dict[str, Any], index: int) -> None:
        self.again = 0
        self.entered = 0.0
        self._led, self._order, self._index = led, order, index
        self._rendezvous = self._make()

    def _make(self) -> Rendezvous:
        nodes = self._order["nodes"]
        index = self._index
        return Rendezvous(
            LiveRuntime(self._led),
            self._order["run"],
            f"node-{index}",
            Node(cycle=0, address="127.0.0.1", port=29500, slots=1, infra_rank=index),
            Rules(minimum=nodes, maximum=nodes),
            lease_s=self._order["lease_s"],
        )

    async def enter(self) -> int:
        """Returns its rank as soon as it knows it."""
        while True:
            try:
                await self._rendezvous.__aenter__()
                self.entered = time.monotonic()
                head = self._rendezvous.head
                while (place := self._rendezvous.place(head)) is None:
                    head = await self._rendezvous.changed(head)
                return place.rank
            except (LeaseLost, Retriable, UnknownOutcome):
                self.again += 1
                await self.leave()
                self._rendezvous = self._make()

    async def leave(self) -> None:
        """Give its lease back."""
        await self._rendezvous.__aexit__()


class Participants:
    """Those of one turn that are in this process."""

    def __init__(self, opened: Ledger, order: dict[str, Any]) -> None:
        self.counters: list[Counting] = []
        self._all: list[Participant] = []
        for index in range(order["first"], order["first"] + order["here"]):
            led = opened
            if order["count"]:
                led = Counting(opened)
                self.counters.append(led)
            self._all.append(Participant(led, order, index))

    async def go(self) -> dict[str, Any]:
        """Everybody enters; returns the ranks when all know theirs."""
        ranks = await asyncio.gather(*(one.enter() for one in self._all))
        return {
            "at": time.monotonic(),
            "ranks": ranks,
            "entered": max(one.entered for one in self._all),
            "again": sum(one.again for one in self._all),
        }

    async def leave(self) -> None:
        """Everybody leaves."""
        await asyncio.gather(*(one.leave() for one in self._all))


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    opened: dict[str, Ledger] = {}
    there: Participants | None = None
    profile = ""
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "prepare":
            url = order["where"]
            if url not in opened:
                opened[url] = await ledger.open(url)
            there, profile = Participants(opened[url], order), order["profile"]
        elif order["do"] == "go":
            assert there is not None
            profiler = cProfile.Profile() if profile else None
            if profiler is not None:
                profiler.enable()
            answer = await there.go()
            if profiler is not None:
                profiler.disable()
                profiler.dump_stats(profile)
            answer["calls"] = [counter.calls for counter in there.counters]
        elif there is not None:
            await there.leave()
        print(json.dumps(answer), flush=True)
    for led in opened.values():
        await led.close()


if __name__ == "__main__":
    asyncio.run(_serve())
