"""What a trainer knows of its job, and what follows from it: the core's rules. Pure.

`CoreState` holds what the ledger's records say, as far as this trainer has read or written them.
Each method is one event with its time. It refuses (the errors that a client hears), or returns
what the shell (`core.py`) must do: write a record, wait for a write that is under way, or answer.
The shell tells the state what became durable: `added`, `settled`, `add_session`, `add_sampler`.

- An operation that arrives is only *pending* until the ledger has it. A second send of it waits
  for the same write, so one number never stands for two operations (`arrive`).
- A result is known once it is durable, and never changes (`result`).
- What the state answers follows from the records alone, so a successor answers the same.

`validate` checks what must always hold.
"""

import math
from collections.abc import Iterator, Mapping

from holdfast.errors import Exists, Gone, Mistake, NotFound, Unavailable
from holdfast.jobs.policy import Policy
from holdfast.trainer import ops
from holdfast.trainer.book import Book
from holdfast.trainer.line import Arrival, Line
from holdfast.trainer.records import Content, Entry, Model, Place, Result, Sampler, Save, Session
from holdfast.trainer.state import Pending, State, check_number, publisher, sampler_name

__all__ = ["CoreState", "read_promise"]

MAX_AHEAD = 16_384
"""How far a number may be ahead: what is missing in between is given up one by one."""
_NUMBER_DIGITS = 19


def read_promise(request: str) -> tuple[str, int]:
    """The line and the number that a promise names."""
    name, _, text = request.rpartition(":")
    if not name or not text.isdecimal() or len(text) > _NUMBER_DIGITS:
        raise NotFound(f"{request[:80]!r} was never promised")
    return name, int(text)


class CoreState:
    """See the module. `now` is the runtime's clock, `wall` the one that records carry."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lines: dict[str, State] = {}
        self.sessions: dict[str, Session] = {}
        self.seen: dict[str, float] = {}
        """When a session that lives was last heard of, by the runtime's clock."""
        self.young: set[Place] = set()
        """Contents that are in a segment and not yet in a line: no sweep may remove them."""
        self._order = 0
        """Counts results, over all lines and lives."""
        self._used = 0
        self._last = ""
        """The line whose operation was carried out last."""

    def open(self, book: Book, newest: Mapping[str, int | None], now: float) -> None:
        """Go on from what the ledger has, and from each living model's newest checkpoint."""
        self.sessions.update(book.sessions)
        self.seen.update({name: now for name, one in book.sessions.items() if not one.ended})
        for name, model in book.models.items():
            kept = newest.get(name)
            line = Line(
                done=-1 if kept is None else kept,
                trimmed=model.trimmed,
                forgotten={0: model.forgotten},
                entries=_above(book.entries.get(name, {}), model.trimmed),
                results=dict(sorted(book.results.get(name, {}).items())),
            )
            lost = f"the model {name} is lost: {book.lost[name]}" if name in book.lost else ""
            self.lines[name] = State(name, line, model=model, restorable=kept, lost=lost)
        for name, sampler in book.samplers.items():
            results = sorted(book.results.get(name, {}).items(), key=lambda it: it[1].at)
            line = Line(
                ordered=False,
                forgotten={int(block): number for block, number in sampler.forgotten.items()},
                results=dict(results),
            )
            entries = book.entries.get(name, {}).items()
            line.entries = {number: one for number, one in entries if number not in line.results}
            self.lines[name] = State(name, line, sampler=sampler)
        orders = (one.order for known in book.results.values() for one in known.values())
        self._order = max(orders, default=0)

    # ---- sessions --------------------------------------------------------------

    def check_room_for_sessions(self) -> None:
        """Refuse one session too many."""
        if len(self.seen) >= self.policy.max_sessions:
            raise Unavailable(f"there are {len(self.seen)} sessions already: come again later")

    def add_session(self, name: str, session: Session, now: float) -> None:
        """A session is in the ledger."""
        self.sessions[name] = session
        self.seen[name] = now

    def session(self, name: str, now: float) -> Session:
        """A session that lives. The client that names it has been heard of."""
        session = self.sessions.get(name)
        if session is None:
            raise NotFound(f"there is no session {name[:80]!r}: create one")
        if session.ended:
            raise Gone(f"the session {name} has ended: create a new one")
        self.seen[name] = now
        return session

    def silent(self, now: float) -> frozenset[str]:
        """Sessions that were not heard of for some time, or have ended."""
        before = now - self.policy.silent_s
        return frozenset(name for name in self.sessions if self.seen.get(name, -math.inf) < before)

    def overdue(self, now: float) -> list[str]:
        """Sessions that were not heard of for so long that they end."""
        limit_s = self.policy.session_s
        return [name for name, heard in self.seen.items() if now - heard > limit_s]

    # ---- lines -----------------------------------------------------------------

    def find(self, name: str, now: float) -> State:
        """A line that lives."""
        state = self.find_any(name, now)
        if state.ended:
            raise Gone(f"{name} was unloaded, or its session has ended")
        return state

    def find_any(self, name: str, now: float) -> State:
        """A line, whether it lives or not."""
        state = self.lines.get(name)
        if state is None:
            if self._has_been(name):
                raise Gone(f"the sampling session {name} has ended, and its weights are gone")
            raise NotFound(f"there is no model or sampling session {name[:80]!r}")
        if state.session in self.seen:
            self.seen[state.session] = now
        return state

    def _has_been(self, name: str) -> bool:
        """Whether there was such a sampling session, of which nothing is left."""
        made = publisher(name)
        if made is None:
            session = self.sessions.get(name.partition("-")[0])
            return session is not None and session.ended
        model = self.lines.get(made[0])
        return model is not None and made[1] <= model.line.done

    def begin_model(
        self, session: str, seq: int, op: ops.CreateModel, save: Save | None, wall: float
    ) -> tuple[str, Model]:
        """Name and record of a model to be created; `save`: what it is loaded from."""
        name = f"{session}-{check_number(seq)}"
        model = Model(
            session=session,
            base=op.base if save is None else op.base or save.base,
            lora=op.lora if save is None else save.lora,
            created_at=wall,
            metadata=op.metadata,
        )
        if name not in self.lines:
            self._check_room_for_models()
            self.lines[name] = State(name, Line(), model=model)
        return name, model

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

    def known_sampler(self, session: str, seq: int, base: str, channel: str) -> str | None:
        """The sampling session that was begun under this number; None: a new one."""
        name = sampler_name(session, seq)
        known = self.lines.get(name)
        if known is None:
            return None
        if known.channel != channel or not (channel or known.base == base):
            raise Exists(
                f"sampling session {seq} of {session} stands for other weights: "
                "are two clients using one session?"
            )
        return name

    def check_room_for_samplers(self) -> None:
        """Refuse one sampling session too many."""
        count = sum(1 for one in self.lines.values() if one.sampler and not one.ended)
        if count >= self.policy.max_samplers:
            raise Unavailable(f"there are {count} sampling sessions already: come again later")

    def add_sampler(self, name: str, sampler: Sampler) -> None:
        """A sampling session is in the ledger."""
        self.lines.setdefault(name, State(name, Line(ordered=False), sampler=sampler))

    def outdated(self) -> list[State]:
        """Sampling sessions of unnamed weights that are gone, because newer ones were made."""
        channels: dict[str, list[State]] = {}
        for state in self.lines.values():
            if state.unnamed and not state.ended:
                channels.setdefault(state.channel, []).append(state)
        old = [
            one
            for states in channels.values()
            for one in sorted(states, key=lambda one: one.version)[: -self.policy.sampler_keep]
        ]
        return [one for one in old if not one.wanted]

    def in_memory(self) -> list[State]:
        """The lines whose models are in memory."""
        return [one for one in self.lines.values() if one.loaded]

    def census(self) -> dict[str, int]:
        """How many models there are, and where."""
        aside = sum(
            1
            for one in self.lines.values()
            if one.restorable is not None and not (one.loaded or one.ended)
        )
        return {"in_memory": len(self.in_memory()), "put_aside": aside}

    def next_line(self) -> State | None:
        """The next line that has something to do, in turn."""
        names = [name for name, state in self.lines.items() if not state.ended]
        if self._last in names:
            at = names.index(self._last) + 1
            names = names[at:] + names[:at]
        for name in names:
            if self.lines[name].line.next() is not None:
                self._last = name
                return self.lines[name]
        return None

    def use(self, state: State) -> None:
        """An operation of this line is carried out: it is the one that was used last."""
        self._used += 1
        state.used = self._used

    # ---- operations ------------------------------------------------------------

    def unload_number(self, name: str, now: float) -> int:
        """The number under which a model is forgotten: it has been asked, or the next one."""
        state = self.find_any(name, now)
        if state.model is None:
            raise NotFound(f"there is no model {name[:80]!r}")
        asked = {number: one.kind for number, one in state.line.results.items()}
        asked |= {number: one.kind for number, one in state.line.entries.items()}
        asked |= {number: kind for number, (kind, _) in state.pending.items()}
        for number, kind in asked.items():
            if kind == ops.kind(ops.Unload()):
                return number
        return max(state.line.done, *state.line.entries, *state.pending, -1) + 1

    def arrive(self, name: str, number: int, kind: str, identity: str, now: float) -> Arrival:
        """What to do with an operation: write it (NEW), wait (PENDING), or answer (DUPLICATE)."""
        state = self.find_any(name, now)
        check_number(number)
        arrival = state.arrive(number, kind, identity)
        if arrival is Arrival.CLASH:
            raise Exists(
                f"number {number} of {name} stands for another operation: "
                "are two clients using one model? Each needs a model of its own"
            )
        if arrival is Arrival.FORGOTTEN:
            raise Gone(f"operation {number} of {name} was carried out long ago")
        if arrival is Arrival.NEW:
            self.find(name, now)
            self._check_room_for_operations(state, number)
        return arrival

    def _check_room_for_operations(self, state: State, number: int) -> None:
        line = state.line
        if line.ordered and number > line.done + MAX_AHEAD:
            raise Mistake(
                f"number {number} of {state.name} is far ahead of {line.done}, which was "
                f"carried out last: numbers follow each other (at most {MAX_AHEAD} ahead)"
            )
        if line.waiting() + len(state.pending) >= self.policy.max_waiting:
            waiting = f"{state.name} has {line.waiting()} operations waiting"
            raise Unavailable(waiting, retry_after_s=1.0)

    def kept(self, content: Content) -> Content:
        """A content was written; it is young until its record is in a line."""
        if content.place is not None:
            self.young.add(content.place)
        return content

    def _grown(self, content: Content) -> None:
        if content.place is not None:
            self.young.discard(content.place)

    def added(self, state: State, number: int, entry: Entry) -> None:
        """The ledger has this operation now."""
        state.line.add(number, entry)
        self._grown(entry.content)

    def make_result(
        self, entry: Entry, content: Content, *, failed: bool, term: int, wall: float
    ) -> Result:
        """The record of what came of an operation."""
        self._order += 1
        return Result(
            kind=entry.kind,
            identity=entry.identity,
            term=term,
            at=wall,
            content=content,
            failed=failed,
            order=self._order,
        )

    def settled(self, state: State, number: int, result: Result) -> None:
        """The ledger has this result now."""
        state.line.settle(number, result)
        self._grown(result.content)

    # ---- results ---------------------------------------------------------------

    def result(self, state: State, number: int) -> Result | None:
        """The result, if there is one; None while it is waited for; `Gone`, `NotFound`."""
        result = state.line.results.get(number)
        if result is not None or number in state.pending or number in state.line.entries:
            return result
        if state.ended or state.line.is_forgotten(number) or number <= state.line.trimmed:
            raise Gone(f"the result of {state.name}:{number} is no longer kept")
        raise NotFound(f"{state.name}:{number} was never promised")

    def why_not(self, state: State, number: int) -> Pending:
        """What an operation without a result waits for."""
        line = state.line
        if line.ordered and line.gap is not None and number > line.gap:
            return Pending("active", f"waits for operation {line.gap}, which has not come")
        before = max(0, number - line.done - 1) if line.ordered else 0
        return Pending("active", f"{before} operations before it" if before else "in work")

    def completions(
        self, state: State, block: int, cursor: int
    ) -> tuple[list[tuple[str, int | None]], int]:
        """Which results of a sampling session came after `cursor`, with their sizes."""
        fresh = [
            (number, result)
            for number, result in state.line.results.items()
            if state.line.block(number) == block and result.order > cursor
        ]
        done: list[tuple[str, int | None]] = [
            (f"{state.name}:{number}", None if result.failed else result.content.size)
            for number, result in fresh
        ]
        return done, max((result.order for _, result in fresh), default=cursor)

    def places(self) -> set[Place]:
        """Everything in the segments that is still needed, or will be in a moment."""
        lines = [state.line for state in self.lines.values()]
        contents = [one.content for line in lines for one in line.entries.values()]
        contents += [one.content for line in lines for one in line.results.values()]
        return {one.place for one in contents if one.place is not None} | self.young

    # ---- what must always hold -------------------------------------------------

    def validate(self) -> None:
        """Raise `AssertionError` with everything that does not hold."""
        wrong = [*self._wrong_sessions()]
        for state in self.lines.values():
            wrong += [f"{state.name}: {one}" for one in self._wrong_line(state)]
        assert not wrong, "; ".join(wrong)

    def _wrong_sessions(self) -> Iterator[str]:
        for name in self.seen:
            if name not in self.sessions or self.sessions[name].ended:
                yield f"session {name} is heard of, and has ended or was never begun"

    def _wrong_line(self, state: State) -> Iterator[str]:
        line = state.line
        if (state.model is None) == (state.sampler is None):
            yield "it is a model or a sampling session, and not both"
        elif line.ordered != (state.model is not None):
            yield "a model has an order, and a sampling session has none"
        if line.entries.keys() & state.pending.keys():
            yield "an operation is in the ledger, and is still being written"
        if line.ordered and any(number <= line.trimmed for number in line.entries):
            yield f"an operation up to {line.trimmed} was kept though it was trimmed"
        if line.ordered and line.trimmed > line.done and not state.ended:
            yield f"operations up to {line.trimmed} were trimmed, and {line.done} was the last"
        if not line.ordered and line.entries.keys() & line.results.keys():
            yield "an operation has its result, and waits"
        if not line.ordered and line.computed - line.entries.keys():
            yield "an operation was carried out that nobody asked for"
        if any(result.order > self._order for result in line.results.values()):
            yield f"a result was counted beyond {self._order}"


def _above(entries: dict[int, Entry], trimmed: int) -> dict[int, Entry]:
    return {number: entries[number] for number in sorted(entries) if number > trimmed}
