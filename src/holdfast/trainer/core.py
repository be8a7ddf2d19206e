"""The trainer without HTTP and without torch: carries out what `decide.py` decides.

- An operation is durable in the journal before its promise is given (`submit`).
- A result is durable before anybody hears of it, and never changes afterwards (`retrieve`).
- What a client may ask is decided by the records alone, so a successor answers for its
  predecessor: the same promise for the same number, the same result for the same promise.

`runner.py` carries operations out; `upkeep.py` gives up missing numbers and forgets.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from holdfast import faults
from holdfast.errors import Gone, Mistake, NotFound
from holdfast.jobs.policy import Policy
from holdfast.ledger.records import put
from holdfast.ledger.runtime import Runtime
from holdfast.trainer import ops
from holdfast.trainer.book import Book
from holdfast.trainer.decide import CoreState, read_promise
from holdfast.trainer.journal import Journal, Write
from holdfast.trainer.line import Arrival
from holdfast.trainer.ops import Failed, Op, Outcome
from holdfast.trainer.paths import parse
from holdfast.trainer.records import Content, Entry, Result, Sampler, Session
from holdfast.trainer.saves import Saves, Tell
from holdfast.trainer.seams import Compute, Vault
from holdfast.trainer.segments import Segments, content_of, read_content
from holdfast.trainer.state import Pending, State, channel_of, checkpoints_of, sampler_name

__all__ = ["Core"]

ARRIVED = faults.declare("trainer.journal.before", "an operation has come, not in the journal")
JOURNALED = faults.declare("trainer.journal.after", "in the journal, nobody has the promise")


class Core:
    """See the module. One at a time acts for a job: the one whose journal holds the seat."""

    def __init__(
        self,
        runtime: Runtime,
        journal: Journal,
        segments: Segments,
        compute: Compute,
        vault: Vault,
        policy: Policy,
        wall: Callable[[], float],
        tell: Tell = lambda *_: (),
        owner: str = "",
    ) -> None:
        """`tell`: what to record elsewhere when something is saved or deleted; see `Tell`."""
        self.owner = owner
        self.runtime = runtime
        self.journal = journal
        self.keys = journal.keys
        self.segments = segments
        self.compute = compute
        self.vault = vault
        self.policy = policy
        self.wall = wall
        self.known = CoreState(policy)
        self.lines = self.known.lines
        self.saves = Saves(journal, vault, wall, tell)
        self.work = asyncio.Event()
        """There may be something to be carried out."""
        self._writing: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Who writes what is pending."""
        self._heard: dict[tuple[str, int], asyncio.Event] = {}

    async def open(self, book: Book) -> None:
        """Go on from what the ledger and the vault have."""
        self.saves.open(book.saves)
        living = [name for name, model in book.models.items() if not model.ended]
        newest = {name: await self.vault.newest(checkpoints_of(name)) for name in living}
        self.known.open(book, newest, self.runtime.now())
        self.work.set()

    @contextlib.asynccontextmanager
    async def sure(self) -> AsyncIterator[None]:
        """Say "no" only as the one who acts for the job: what we remember may be old."""
        try:
            yield
        except (Gone, Mistake):
            await self.journal.check()
            raise

    def find(self, name: str) -> State:
        """A line that lives."""
        return self.known.find(name, self.runtime.now())

    def find_any(self, name: str) -> State:
        """A line, whether it lives or not."""
        return self.known.find_any(name, self.runtime.now())

    # ---- sessions, models, sampling sessions -----------------------------------

    async def create_session(self, tags: tuple[str, ...] = ()) -> str:
        """A new session. Asked twice, there are two: nothing hangs on the other."""
        self.known.check_room_for_sessions()
        name = f"{self.runtime.random.getrandbits(64):016x}"
        now = self.wall()
        session = Session(created_at=now, seen_at=now, tags=tags)
        await self.journal.write(put(self.keys.session(name), session))
        self.known.add_session(name, session, self.runtime.now())
        return name

    async def heartbeat(self, name: str) -> None:
        """A sign of life. `Gone` when the session has ended."""
        async with self.sure():
            self.known.session(name, self.runtime.now())

    async def create_model(self, session: str, seq: int, op: ops.CreateModel) -> tuple[str, str]:
        """Begin a model; returns its promise and its name. Asked twice, it is the same one."""
        async with self.sure():
            self.known.session(session, self.runtime.now())
            save = self.saves.find(op.load.path)[1] if op.load is not None else None
            name, model = self.known.begin_model(session, seq, op, save, self.wall())
            # The promise and the model's record become durable together.
            request = await self.submit(name, 0, op, also=(put(self.keys.model(name), model),))
            return request, name

    async def create_sampler(self, session: str, seq: int, base: str, path: str) -> str:
        """Begin a sampling session on a base or on saved weights. Asked twice: the same one."""
        async with self.sure():
            self.known.session(session, self.runtime.now())
            channel = channel_of(*parse(path)) if path else ""
            name = self.known.known_sampler(session, seq, base, channel)
            return name or await self._new_sampler(session, seq, base, path)

    async def _new_sampler(self, session: str, seq: int, base: str, path: str) -> str:
        name, sampler = sampler_name(session, seq), Sampler(session=session, base=base)
        if path:
            where, save = self.saves.find(path)
            sampler = Sampler(
                session=session,
                base=save.base,
                lora=save.lora,
                channel=channel_of(*where),
                version=save.version,
            )
        self.known.check_room_for_samplers()
        await self.journal.write(put(self.keys.sampler(name), sampler))
        self.known.add_sampler(name, sampler)
        return name

    async def join_sampler(self, name: str) -> int:
        """Another copy of a sampling client; returns its number."""
        state = self.find(name)
        if state.sampler is None:
            raise NotFound(f"there is no sampling session {name[:80]!r}")
        clients = state.sampler.clients + 1
        await self.record(state, clients=clients)
        return clients

    async def record(self, state: State, **changes: Any) -> None:
        """Change the record of a model or of a sampling session, and make that durable."""
        if state.model is not None:
            state.model = msgspec.structs.replace(state.model, **changes)
            await self.journal.write(put(self.keys.model(state.name), state.model))
        elif state.sampler is not None:
            state.sampler = msgspec.structs.replace(state.sampler, **changes)
            await self.journal.write(put(self.keys.sampler(state.name), state.sampler))

    # ---- operations ------------------------------------------------------------

    async def unload(self, name: str, op: ops.Unload) -> str:
        """Promise to forget a model. It has no number of its own: it is the last one."""
        async with self.sure():
            number = self.known.unload_number(name, self.runtime.now())
            return await self.submit(name, number, op)

    async def submit(
        self,
        name: str,
        number: int,
        op: Op,
        *,
        refused: Failed | None = None,
        also: tuple[Write, ...] = (),
    ) -> str:
        """Promise an operation; returns the promise. With `refused`, that is its result.

        A number that was refused is used up, as if it had been carried out and failed.
        """
        async with self.sure():
            now = self.runtime.now()
            arrival = self.known.arrive(name, number, ops.kind(op), self.identity(op), now)
            if arrival is Arrival.NEW:
                await self.append(self.lines[name], number, op, refused=refused, also=also)
            elif arrival is Arrival.PENDING:
                await asyncio.shield(self._writing[name, number])
            return f"{name}:{number}"

    def is_known(self, name: str, number: int, kind: type[Op]) -> bool:
        """Whether this number stands for an operation of this kind, and is durable."""
        line = self.find_any(name).line
        known = line.entries.get(number) or line.results.get(number)
        return known is not None and known.kind == kind.__struct_config__.tag

    def identity(self, op: Op) -> str:
        """What a duplicate is known by."""
        return ops.identity(op)

    async def append(
        self,
        state: State,
        number: int,
        op: Op,
        *,
        refused: Failed | None = None,
        also: tuple[Write, ...] = (),
    ) -> None:
        """Write an operation to the journal; it goes on when whoever asked has gone."""
        work = self._append(state, number, op, refused, also)
        writing = self.runtime.spawn(work, name=f"append {state.name}:{number}")
        state.pending[number] = (ops.kind(op), self.identity(op))
        self._writing[state.name, number] = writing
        await asyncio.shield(writing)

    async def _append(
        self, state: State, number: int, op: Op, refused: Failed | None, also: tuple[Write, ...]
    ) -> None:
        try:
            await faults.apoint(ARRIVED)
            skip = refused is not None
            data = ops.encode(ops.Skip(reason="refused") if skip else op)
            entry = Entry(
                kind=ops.kind(op),
                identity=self.identity(op),
                term=self.journal.term,
                at=self.wall(),
                content=self._keep(data),
                skip=skip,
            )
            writes: list[Write] = [put(self.keys.op(state.name, number), entry), *also]
            result = None
            if refused is not None:
                result = self.result_of(entry, refused)
                writes.append(put(self.keys.result(state.name, number), result))
            await self.journal.write(*writes)
            await faults.apoint(JOURNALED)
            state.since_bytes += len(data)
            self.known.added(state, number, entry)
            if result is not None:
                self.settled(state, number, result)
            self.work.set()
        finally:
            del state.pending[number], self._writing[state.name, number]

    def _keep(self, data: bytes) -> Content:
        return self.known.kept(content_of(data, self.segments))

    def result_of(self, entry: Entry, outcome: Outcome) -> Result:
        """The record of what came of an operation."""
        return self.known.make_result(
            entry,
            self._keep(ops.encode(outcome)),
            failed=isinstance(outcome, Failed),
            term=self.journal.term,
            wall=self.wall(),
        )

    def settled(self, state: State, number: int, result: Result) -> None:
        """A result is durable: whoever waits for it may hear of it."""
        self.known.settled(state, number, result)
        event = self._heard.pop((state.name, number), None)
        if event is not None:
            event.set()

    # ---- results ---------------------------------------------------------------

    async def retrieve(self, request: str, hold_s: float) -> Outcome | Pending:
        """What came of a promise; waits for it, but not longer than `hold_s`."""
        async with self.sure():
            name, number = read_promise(request)
            state = self.find_any(name)
            result = self.known.result(state, number)
            if result is None:
                event = self._heard.setdefault((name, number), asyncio.Event())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(hold_s):
                        await event.wait()
                result = self.known.result(state, number)
            if result is None:
                return self.known.why_not(state, number)
            return ops.decode_outcome(read_content(result.content, self.segments))

    def wake_all(self) -> None:
        """Nothing more will come: let everybody who waits look."""
        for event in list(self._heard.values()):
            event.set()
        self._heard.clear()
