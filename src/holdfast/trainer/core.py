"""The trainer without HTTP and without torch: promises, results, sessions.

- An operation is durable in the journal before its promise is given (`submit`).
- A result is durable before anybody hears of it, and never changes afterwards (`retrieve`).
- What a client may ask is decided by the records alone, so a successor answers for its
  predecessor: the same promise for the same number, the same result for the same promise.

`runner.py` carries operations out; `upkeep.py` gives up missing numbers and forgets.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

import msgspec

from holdfast import faults
from holdfast.errors import Exists, Gone, Mistake, NotFound, Unavailable
from holdfast.jobs.policy import Policy
from holdfast.ledger.records import put
from holdfast.ledger.runtime import Runtime
from holdfast.trainer import ops
from holdfast.trainer.book import Book
from holdfast.trainer.journal import Journal, Write
from holdfast.trainer.line import SKIP, Arrival, Line
from holdfast.trainer.ops import Failed, Op, Outcome
from holdfast.trainer.paths import parse
from holdfast.trainer.records import (
    Content,
    Entry,
    Model,
    Place,
    Result,
    Sampler,
    Session,
)
from holdfast.trainer.saves import Saves, Tell
from holdfast.trainer.seams import Compute, Vault
from holdfast.trainer.segments import Segments, content_of, read_content
from holdfast.trainer.state import (
    Pending,
    State,
    channel_of,
    check_number,
    checkpoints_of,
    publisher,
    sampler_name,
)

__all__ = ["Core"]

MAX_AHEAD = 16_384
"""How far a number may be ahead: what is missing in between is given up one by one."""
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
        self.lines: dict[str, State] = {}
        self.sessions: dict[str, Session] = {}
        self.seen: dict[str, float] = {}
        """When a session was last heard of, by our own clock."""
        self.saves = Saves(journal, vault, wall, tell)
        self.work = asyncio.Event()
        """There may be something to be carried out."""
        self.young: set[Place] = set()
        """Contents that are in a segment and not yet in a line: no sweep may remove them."""
        self._order = 0
        """Counts results, over all lines and lives."""
        self._used = 0
        self._heard: dict[tuple[str, int], asyncio.Event] = {}

    async def open(self, book: Book) -> None:
        """Go on from what the ledger and the vault have."""
        now = self.runtime.now()
        self.sessions = dict(book.sessions)
        self.seen = {name: now for name, one in book.sessions.items() if not one.ended}
        self.saves.open(book.saves)
        for name, model in book.models.items():
            newest = None if model.ended else await self.vault.newest(checkpoints_of(name))
            done = -1 if newest is None else newest
            line = Line(done=done, trimmed=model.trimmed, forgotten={0: model.forgotten})
            line.entries = _above(book.entries.get(name, {}), model.trimmed)
            line.results = dict(sorted(book.results.get(name, {}).items()))
            lost = f"the model {name} is lost: {book.lost[name]}" if name in book.lost else ""
            self.lines[name] = State(name, line, model=model, restorable=newest, lost=lost)
        for name, sampler in book.samplers.items():
            forgotten = {int(block): number for block, number in sampler.forgotten.items()}
            line = Line(ordered=False, forgotten=forgotten)
            line.results = dict(
                sorted(book.results.get(name, {}).items(), key=lambda it: it[1].at)
            )
            line.entries = {
                number: entry
                for number, entry in book.entries.get(name, {}).items()
                if number not in line.results
            }
            self.lines[name] = State(name, line, sampler=sampler)
        orders = [one.order for known in book.results.values() for one in known.values()]
        self._order = max(orders, default=0)
        self.work.set()

    # ---- sessions --------------------------------------------------------------

    async def create_session(self, tags: tuple[str, ...] = ()) -> str:
        """A new session. Asked twice, there are two: nothing hangs on the other."""
        if len(self.seen) >= self.policy.max_sessions:
            raise Unavailable(f"there are {len(self.seen)} sessions already: come again later")
        name = f"{self.runtime.random.getrandbits(64):016x}"
        now = self.wall()
        session = Session(created_at=now, seen_at=now, tags=tags)
        await self.journal.write(put(self.keys.session(name), session))
        self.sessions[name] = session
        self.seen[name] = self.runtime.now()
        return name

    def session(self, name: str) -> Session:
        """A session that lives. Whoever asks for it has been heard of."""
        session = self.sessions.get(name)
        if session is None:
            raise NotFound(f"there is no session {name[:80]!r}: create one")
        if session.ended:
            raise Gone(f"the session {name} has ended: create a new one")
        self.seen[name] = self.runtime.now()
        return session

    @contextlib.asynccontextmanager
    async def sure(self) -> AsyncIterator[None]:
        """Say "no" only as the one who acts for the job: what we remember may be old."""
        try:
            yield
        except (Gone, Mistake):
            await self.journal.check()
            raise

    async def heartbeat(self, name: str) -> None:
        """A sign of life. `Gone` when the session has ended."""
        async with self.sure():
            self.session(name)

    # ---- models ----------------------------------------------------------------

    async def create_model(self, session: str, seq: int, op: ops.CreateModel) -> tuple[str, str]:
        """Begin a model; returns its promise and its name. Asked twice, it is the same one."""
        async with self.sure():
            self.session(session)
            return await self._create_model(session, seq, op)

    async def _create_model(self, session: str, seq: int, op: ops.CreateModel) -> tuple[str, str]:
        name = f"{session}-{check_number(seq)}"
        base, lora = op.base, op.lora
        if op.load is not None:
            _, save = self.saves.find(op.load.path)
            base, lora = op.base or save.base, save.lora
        model = Model(
            session=session,
            base=base,
            lora=lora,
            created_at=self.wall(),
            metadata=op.metadata,
        )
        state = self.lines.get(name)
        if state is None:
            # The promise and the model's record become durable together.
            self._check_room_for_models()
            state = self.lines[name] = State(name, Line(), model=model)
        request = await self.submit(name, 0, op, also=(put(self.keys.model(name), model),))
        return request, name

    def _check_room_for_models(self) -> None:
        """Refuse one model too many: in work, or on disk."""
        living = [one for one in self.lines.values() if one.model and not one.ended]
        kept = sum(1 for one in living if not one.stillborn)
        if kept >= self.policy.max_kept_models:
            raise Unavailable(
                f"this job has {kept} models, in memory or put aside on disk, and keeps no more "
                "(max_kept_models): unload models, or close the sessions that made them",
                retry_after_s=10.0,
            )
        wanted = sum(1 for one in living if one.wanted)
        if wanted >= self.policy.max_models:
            raise Unavailable(
                f"{wanted} models have operations in work or waiting, and no more than "
                f"{self.policy.max_models} fit into memory (max_models): send this again soon",
                retry_after_s=1.0,
            )

    def in_memory(self) -> list[State]:
        """The lines whose models are in memory."""
        return [one for one in self.lines.values() if one.loaded]

    def census(self) -> dict[str, int]:
        """How many models there are, and where."""
        held = len(self.in_memory())
        aside = [
            one
            for one in self.lines.values()
            if one.restorable is not None and not (one.loaded or one.ended)
        ]
        return {"in_memory": held, "put_aside": len(aside)}

    def silent(self) -> frozenset[str]:
        """Sessions that were not heard of for some time, or have ended."""
        before = self.runtime.now() - self.policy.silent_s
        return frozenset(name for name in self.sessions if self.seen.get(name, -math.inf) < before)

    def count(self) -> int:
        """Counts what is carried out, so that it is known what was used last."""
        self._used += 1
        return self._used

    async def create_sampler(self, session: str, seq: int, base: str, path: str) -> str:
        """Begin a sampling session on a base or on saved weights. Asked twice: the same one."""
        async with self.sure():
            self.session(session)
            return await self._create_sampler(session, seq, base, path)

    async def _create_sampler(self, session: str, seq: int, base: str, path: str) -> str:
        name = sampler_name(session, seq)
        channel = channel_of(*parse(path)) if path else ""
        known = self.lines.get(name)
        if known is not None:
            assert known.sampler is not None
            if known.sampler.channel != channel or not (path or known.base == base):
                raise Exists(
                    f"sampling session {seq} of {session} stands for other weights: "
                    "are two clients using one session?"
                )
            return name
        sampler = Sampler(session=session, base=base)
        if path:
            _, save = self.saves.find(path)
            sampler = Sampler(
                session=session,
                base=save.base,
                lora=save.lora,
                channel=channel,
                version=save.version,
            )
        self.check_room_for_samplers()
        await self.journal.write(put(self.keys.sampler(name), sampler))
        self.add_sampler(name, sampler)
        return name

    def add_sampler(self, name: str, sampler: Sampler) -> None:
        """A sampling session is in the ledger."""
        self.lines.setdefault(name, State(name, Line(ordered=False), sampler=sampler))

    def check_room_for_samplers(self) -> None:
        """Refuse one sampling session too many."""
        count = sum(1 for one in self.lines.values() if one.sampler and not one.ended)
        if count >= self.policy.max_samplers:
            raise Unavailable(f"there are {count} sampling sessions already: come again later")

    async def join_sampler(self, name: str) -> int:
        """Another copy of a sampling client; returns its number."""
        state = self.find(name)
        if state.sampler is None:
            raise NotFound(f"there is no sampling session {name[:80]!r}")
        sampler = msgspec.structs.replace(state.sampler, clients=state.sampler.clients + 1)
        state.sampler = sampler
        await self.journal.write(put(self.keys.sampler(name), sampler))
        return sampler.clients

    def find(self, name: str) -> State:
        """A line that lives."""
        state = self.find_any(name)
        if state.ended:
            raise Gone(f"{name} was unloaded, or its session has ended")
        return state

    def find_any(self, name: str) -> State:
        """A line, whether it lives or not."""
        state = self.lines.get(name)
        if state is None:
            if self._has_been(name):
                raise Gone(f"the sampling session {name} has ended, and its weights are gone")
            raise NotFound(f"there is no model or sampling session {name[:80]!r}")
        if state.session in self.seen:
            self.seen[state.session] = self.runtime.now()
        return state

    def _has_been(self, name: str) -> bool:
        """Whether there was such a sampling session, of which nothing is left."""
        made = publisher(name)
        if made is None:
            session = self.sessions.get(name.partition("-")[0])
            return session is not None and session.ended
        model = self.lines.get(made[0])
        return model is not None and made[1] <= model.line.done

    async def unload(self, name: str, op: ops.Unload) -> str:
        """Promise to forget a model. It has no number of its own: it is the last one."""
        async with self.sure():
            state = self.find_any(name)
            if state.model is None:
                raise NotFound(f"there is no model {name[:80]!r}")
            known = {number: one.kind for number, one in state.line.results.items()}
            known |= {number: one.kind for number, one in state.line.entries.items()}
            for number, kind in known.items():
                if kind == ops.kind(op):
                    return f"{name}:{number}"
            for number, (kind, _, writing) in state.pending.items():
                if kind == ops.kind(op):
                    await asyncio.shield(writing)
                    return f"{name}:{number}"
            used = (state.line.done, *state.line.entries, *state.pending)
            return await self.submit(name, max(used) + 1, op)

    # ---- operations ------------------------------------------------------------

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
            return await self._submit(name, number, op, refused, also)

    async def _submit(
        self, name: str, number: int, op: Op, refused: Failed | None, also: tuple[Write, ...]
    ) -> str:
        state = self.find_any(name)
        check_number(number)
        kind, identity = ops.kind(op), self.identity(op)
        if number in state.pending:
            was_kind, was_identity, writing = state.pending[number]
            same = was_kind == SKIP or (was_kind, was_identity) == (kind, identity)
            arrival = Arrival.DUPLICATE if same else Arrival.CLASH
        else:
            arrival, writing = state.line.arrive(number, kind, identity), None
        if arrival is Arrival.CLASH:
            raise Exists(
                f"number {number} of {name} stands for another operation: "
                "are two clients using one model? Each needs a model of its own"
            )
        if arrival is Arrival.FORGOTTEN:
            raise Gone(f"operation {number} of {name} was carried out long ago")
        if arrival is Arrival.NEW:
            self.find(name)
            if state.line.ordered and number > state.line.done + MAX_AHEAD:
                raise Mistake(
                    f"number {number} of {name} is far ahead of {state.line.done}, which was "
                    f"carried out last: numbers follow each other (at most {MAX_AHEAD} ahead)"
                )
            if state.line.waiting() + len(state.pending) >= self.policy.max_waiting:
                waiting = f"{name} has {state.line.waiting()} operations waiting"
                raise Unavailable(waiting, retry_after_s=1.0)
            await self.append(state, number, op, refused=refused, also=also)
        elif writing is not None:
            await asyncio.shield(writing)
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
        state.pending[number] = (ops.kind(op), self.identity(op), writing)
        await asyncio.shield(writing)

    async def _append(
        self, state: State, number: int, op: Op, refused: Failed | None, also: tuple[Write, ...]
    ) -> None:
        try:
            await faults.apoint(ARRIVED)
            now = self.wall()
            skip = refused is not None
            data = ops.encode(ops.Skip(reason="refused")) if skip else ops.encode(op)
            entry = Entry(
                kind=ops.kind(op),
                identity=self.identity(op),
                term=self.journal.term,
                at=now,
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
            state.line.add(number, entry)
            self._grown(entry.content)
            if result is not None:
                self.settled(state, number, result)
            self.work.set()
        finally:
            del state.pending[number]

    def _keep(self, data: bytes) -> Content:
        content = content_of(data, self.segments)
        if content.place is not None:
            self.young.add(content.place)
        return content

    def _grown(self, content: Content) -> None:
        if content.place is not None:
            self.young.discard(content.place)

    def result_of(self, entry: Entry, outcome: Outcome) -> Result:
        """The record of what came of an operation."""
        self._order += 1
        return Result(
            kind=entry.kind,
            identity=entry.identity,
            term=self.journal.term,
            at=self.wall(),
            content=self._keep(ops.encode(outcome)),
            failed=isinstance(outcome, Failed),
            order=self._order,
        )

    def settled(self, state: State, number: int, result: Result) -> None:
        """A result is durable: whoever waits for it may hear of it."""
        state.line.settle(number, result)
        self._grown(result.content)
        event = self._heard.pop((state.name, number), None)
        if event is not None:
            event.set()

    # ---- results ---------------------------------------------------------------

    async def retrieve(self, request: str, hold_s: float) -> Outcome | Pending:
        """What came of a promise; waits for it, but not longer than `hold_s`."""
        async with self.sure():
            return await self._retrieve(request, hold_s)

    async def _retrieve(self, request: str, hold_s: float) -> Outcome | Pending:
        name, _, text = request.rpartition(":")
        if not name or not text.isdecimal() or len(text) > 19:
            raise NotFound(f"{request[:80]!r} was never promised")
        number = int(text)
        state = self.find_any(name)
        outcome = self._known(state, number)
        if outcome is not None:
            return outcome
        event = self._heard.setdefault((name, number), asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await event.wait()
        return self._known(state, number) or self._why_not(state, number)

    def _known(self, state: State, number: int) -> Outcome | None:
        """The result, if there is one; None while it is waited for; `Gone`, `NotFound`."""
        result = state.line.results.get(number)
        if result is not None:
            return ops.decode_outcome(read_content(result.content, self.segments))
        if number in state.pending or state.line.entries.get(number) is not None:
            return None
        if state.ended or state.line.is_forgotten(number) or number <= state.line.trimmed:
            raise Gone(f"the result of {state.name}:{number} is no longer kept")
        raise NotFound(f"{state.name}:{number} was never promised")

    def completions(
        self, name: str, block: int, cursor: int
    ) -> tuple[list[tuple[str, int | None]], int]:
        """Which results of a sampling session came after `cursor`, with their sizes."""
        state = self.find(name)
        fresh = [
            (number, result)
            for number, result in state.line.results.items()
            if state.line.block(number) == block and result.order > cursor
        ]
        done: list[tuple[str, int | None]] = [
            (f"{name}:{number}", None if result.failed else _size(result))
            for number, result in fresh
        ]
        return done, max((result.order for _, result in fresh), default=cursor)

    def _why_not(self, state: State, number: int) -> Pending:
        line = state.line
        if line.ordered and line.gap is not None and number > line.gap:
            return Pending("active", f"waits for operation {line.gap}, which has not come")
        before = max(0, number - line.done - 1) if line.ordered else 0
        return Pending("active", f"{before} operations before it" if before else "in work")

    def wake_all(self) -> None:
        """Nothing more will come: let everybody who waits look."""
        for event in list(self._heard.values()):
            event.set()
        self._heard.clear()


def _size(result: Result) -> int:
    content = result.content
    return len(content.inline or b"") if content.place is None else content.place.length


def _above(entries: dict[int, Entry], trimmed: int) -> dict[int, Entry]:
    return {number: entries[number] for number in sorted(entries) if number > trimmed}
