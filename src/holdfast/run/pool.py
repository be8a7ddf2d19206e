"""The replicas of a run, and who is asked for which group.

A group is asked of the replica with the least to do. If its connection breaks, another is asked
at once; if it takes longer than `patience_s`, another is asked as well, and the first answer
counts: all would make the same bits. Replicas come and go by their records in the channel's
book; while there is none, whoever asks waits.
"""

import asyncio
import contextlib

import httpx
import msgspec

from holdfast.errors import Mistake, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger.runtime import Runtime
from holdfast.retry import insist
from holdfast.rollout.asks import Answer, Ask
from holdfast.timeouts import DEFAULTS
from holdfast.weights.book import Book

__all__ = ["Pool"]

_AT_ONCE = 2
"""Groups that a replica has at a time: it makes one while the next is on its way."""


class _Replica:
    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.busy = 0
        self.failures = 0


class Pool:
    """Asks replicas. Use `async with`."""

    def __init__(self, runtime: Runtime, book: Book, token: str, *, patience_s: float) -> None:
        self._runtime = runtime
        self._book = book
        self._patience_s = patience_s
        self._replicas: dict[str, _Replica] = {}
        """By address: a new life of a replica is another replica."""
        self._changed = asyncio.Event()
        """Set when somebody may have time now."""
        limits = httpx.Timeout(DEFAULTS.replica_call_s, connect=DEFAULTS.replica_connect_s)
        self._http = httpx.AsyncClient(
            headers={"x-run-token": token}, timeout=limits, trust_env=False
        )
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Pool":
        self._following = asyncio.create_task(self._follow(), name="replicas")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._http.aclose()

    # ---- who is there ----------------------------------------------------------

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._book.changes()) as changes:
            async for _ in changes:
                await insist(self._runtime, self._look)

    async def _look(self) -> None:
        found = {
            member.record.address: member.record.name
            for member in (await self._book.view()).members
            if member.record.address
        }
        for address in self._replicas.keys() - found.keys():
            del self._replicas[address]
        for address, name in found.items():
            if address not in self._replicas:
                self._replicas[address] = _Replica(name, address)
        self._changed.set()

    async def _take(self, apart: set[str]) -> _Replica:
        """Wait for a replica that has time, and count ourselves in."""
        while True:
            there = [one for one in self._replicas.values() if one.address not in apart]
            if free := [one for one in there if one.busy < _AT_ONCE]:
                chosen = min(free, key=lambda one: (one.failures, one.busy))
                chosen.busy += 1
                return chosen
            self._changed.clear()
            await self._changed.wait()

    # ---- asking ----------------------------------------------------------------

    async def make(self, ask: Ask) -> Answer:
        """Have a group made, by whoever is there, however often they die over it."""
        asked: dict[asyncio.Task[Answer], str] = {}
        try:
            while True:
                apart = set(asked.values())
                replica = await self._take(apart) if not asked else await self._another(apart)
                if replica is not None:
                    work = asyncio.create_task(self._ask(replica, ask))
                    asked[work] = replica.address
                done, _ = await asyncio.wait(
                    asked, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    del asked[task]
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, Retriable | UnknownOutcome):
                        raise error
                if done and not asked:
                    await asyncio.sleep(0.02)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _another(self, apart: set[str]) -> _Replica | None:
        """Another replica that has time right now, if there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                return await self._take(apart)
        return None

    async def _ask(self, replica: _Replica, ask: Ask) -> Answer:
        failures = replica.failures + 1
        try:
            answer = await self._post(replica, ask)
            failures = 0
            return answer
        finally:
            replica.busy -= 1
            replica.failures = failures
            self._changed.set()

    async def _post(self, replica: _Replica, ask: Ask) -> Answer:
        try:
            response = await self._http.post(
                f"{replica.address}/make", content=msgspec.json.encode(ask)
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"{replica.name}: {type(error).__name__} {error}") from None
        if response.status_code == httpx.codes.OK:
            try:
                return msgspec.json.decode(response.content, type=Answer)
            except msgspec.MsgspecError as error:
                raise Unavailable(f"{replica.name} answers nonsense: {error}") from None
        text = f"{replica.name}: {response.status_code} {response.text[:300]}"
        if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
            raise Mistake(text)
        raise Unavailable(text)
