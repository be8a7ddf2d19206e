"""Carries operations out, one at a time, and makes what came of them durable.

- Operations of a model are carried out in the order of their numbers. After a restart the
  same loop carries them out again, from the last checkpoint on: what has a result keeps it,
  and is computed again only for its effect on the model.
- A result is posted before the next operation begins, so results become durable in order.
- What loads saved weights ends with a checkpoint: what was saved may be replaced later, and a
  replay must not read it again. A trainer that dies between the two leaves the one operation
  that has had its effect and has no result; its successor supplies that (`supply`).
- `Now` says in the journal what is being carried out. An operation during which several
  trainers died is not tried again: it has failed.
"""

import asyncio
from collections.abc import Callable

import msgspec
import xxhash

from holdfast import events, faults
from holdfast.errors import Corrupt
from holdfast.ledger.records import put
from holdfast.ledger.types import Delete
from holdfast.trainer import ops
from holdfast.trainer.checkpoints import Checkpoints
from holdfast.trainer.core import Core
from holdfast.trainer.effects import Effect, Effects, changes_state, loaded
from holdfast.trainer.journal import Write
from holdfast.trainer.ops import Failed
from holdfast.trainer.records import Content, Entry, Now, Result
from holdfast.trainer.segments import read_content
from holdfast.trainer.shelf import Shelf
from holdfast.trainer.state import State

__all__ = ["Runner"]

BEFORE = faults.declare("trainer.compute.before", "about to carry an operation out")
AFTER = faults.declare("trainer.compute.after", "carried out, no result recorded")
SETTLED = faults.declare("trainer.result.after", "the result is recorded, nobody has heard it")


class Applied(events.Event, frozen=True, tag="trainer.applied"):
    """An operation was carried out: `again` if it had a result, and this was for its effect."""

    line: str
    number: int
    kind: str
    identity: str
    term: int
    again: bool


class Answered(events.Event, frozen=True, tag="trainer.answered"):
    """The result of an operation is durable."""

    line: str
    number: int
    hash: str
    failed: bool


class Quarantined(events.Event, frozen=True, tag="trainer.quarantined"):
    """An operation is not tried again."""

    line: str
    number: int
    deaths: int


class Differs(events.Event, frozen=True, tag="trainer.differs"):
    """Carried out again, an operation gave another result; the first one stays."""

    line: str
    number: int


class Runner:
    """The one who computes. `run` ends only with an error: then the process must end."""

    def __init__(
        self,
        core: Core,
        now: Now | None,
        *,
        checkpoints: Callable[[Core], Checkpoints] = Checkpoints,
        effects: Callable[[Core, Shelf], Effects] = Effects,
    ) -> None:
        self._core = core
        self._checkpoints = checkpoints(core)
        self._shelf = Shelf(core, self._checkpoints)
        self._effects = effects(core, self._shelf)
        self._suspect = now

    async def run(self) -> None:
        """Carry out whatever there is, for ever."""
        core = self._core
        while True:
            state = core.known.next_line()
            if state is None:
                core.work.clear()
                if core.known.next_line() is None:
                    await self._shelf.tidy()
                    await core.work.wait()
                continue
            number = state.line.next()
            assert number is not None
            state.busy = True
            try:
                await self.carry_out(state, number)
            finally:
                state.busy = False

    # ---- one operation ---------------------------------------------------------

    async def carry_out(self, state: State, number: int) -> None:
        """Carry out one operation and post its result."""
        core, line = self._core, state.line
        entry, known = line.entries[number], line.results.get(number)
        if self._passes_over(entry, known):
            line.finish(number)
            return
        try:
            op = ops.decode_op(read_content(entry.content, core.segments))
        except Corrupt as error:
            await self._unreadable(state, number, entry, error)
            return
        if known is not None and not changes_state(op):
            line.finish(number)
            return
        deaths = self._deaths(state.name, number) if known is None else 0
        if deaths >= core.policy.poison_deaths:
            await self._quarantine(state, number, entry, deaths)
            return
        begun = core.journal.post(
            put(core.keys.now, Now(line=state.name, number=number, deaths=deaths))
        )
        if deaths:
            await begun
        await faults.apoint(BEFORE)
        started = core.runtime.now()
        core.known.use(state)
        effect = await self._effects.carry_out(state, number, op)
        state.since_s += core.runtime.now() - started
        if changes_state(op) and not isinstance(effect.outcome, Failed):
            state.changed = number
        await faults.apoint(AFTER)
        events.emit(
            Applied(
                line=state.name,
                number=number,
                kind=entry.kind,
                identity=entry.identity,
                term=core.journal.term,
                again=known is not None,
            )
        )
        if known is None:
            await self._settle(state, number, entry, effect)
        elif not (state.lost or self._is_known(effect, known)):
            events.emit(Differs(line=state.name, number=number))
        line.finish(number)
        if effect.trims:
            await core.journal.flushed()
            await self._checkpoints.trim(state, number)
        await self._checkpoints.begin_if_due(state, number, op)

    async def _unreadable(self, state: State, number: int, entry: Entry, error: Corrupt) -> None:
        """What has no result fails. What had its effect once cannot have it again."""
        reason = f"operation {number} cannot be read from the journal: {error}"
        if number not in state.line.results:
            outcome = Failed(error=reason, category="server")
            await self._settle(state, number, entry, Effect(outcome))
        elif state.line.ordered:
            await self._effects.give_up(state, reason)
        state.line.finish(number)

    def _is_known(self, effect: Effect, known: Result) -> bool:
        return ops.encode(effect.outcome) == read_content(known.content, self._core.segments)

    def _passes_over(self, entry: Entry, known: Result | None) -> bool:
        """Whether it had no effect, and so has none in a replay."""
        return entry.skip or (known is not None and known.failed)

    def _deaths(self, name: str, number: int) -> int:
        """How many trainers have died of it, as far as is known."""
        suspect = self._suspect
        if suspect is None or (suspect.line, suspect.number) != (name, number):
            return 0
        return suspect.deaths + 1

    async def _quarantine(self, state: State, number: int, entry: Entry, deaths: int) -> None:
        events.emit(Quarantined(line=state.name, number=number, deaths=deaths))
        outcome = Failed(
            error=f"{deaths} trainers died while they carried this operation out: "
            "it is not tried again, and had no effect",
            category="server",
        )
        writes: list[Write] = []
        if state.line.ordered:
            # A tombstone: a replay passes over it. What has no order goes with its result.
            skip = msgspec.structs.replace(entry, skip=True)
            state.line.entries[number] = skip
            writes.append(put(self._core.keys.op(state.name, number), skip))
        await self._settle(state, number, entry, Effect(outcome, writes))
        state.line.finish(number)

    async def _settle(self, state: State, number: int, entry: Entry, effect: Effect) -> None:
        """Post the result, and whatever belongs to it, as one."""
        core = self._core

        async def kept() -> Result:
            return core.result_of(entry, effect.outcome)

        result = await self._effects.patient(kept)
        writes: list[Write] = [put(core.keys.result(state.name, number), result), *effect.writes]
        if effect.model is not None:
            state.model = effect.model
            writes.append(put(core.keys.model(state.name), effect.model))
        if effect.sampler is not None:
            name, sampler = effect.sampler
            writes.append(put(core.keys.sampler(name), sampler))
        if effect.save is not None:
            where, save = effect.save
            core.saves[where] = save
            writes.append(put(core.keys.save(*where), save))
        if not state.line.ordered:
            writes.append(Delete(core.keys.op(state.name, number)))
        posted = core.journal.post(*writes)

        def durable(done: "asyncio.Future[None]") -> None:
            if done.cancelled() or done.exception() is not None:
                return
            events.emit(
                Answered(
                    line=state.name,
                    number=number,
                    hash=_digest(result.content),
                    failed=result.failed,
                )
            )
            faults.point(SETTLED)
            if effect.sampler is not None:
                core.known.add_sampler(*effect.sampler)
            core.settled(state, number, result)

        posted.add_done_callback(durable)

    # ---- models ----------------------------------------------------------------

    async def supply(self) -> None:
        """Give results to operations that a checkpoint covers, and whose trainer died then."""
        for state in self._core.lines.values():
            line = state.line
            if state.model is None or state.ended or line.done < 0:
                continue
            for number in [one for one in line.entries if one <= line.done]:
                if number not in line.results and not line.entries[number].skip:
                    entry = line.entries[number]
                    await self._settle(state, number, entry, self._supplied(state, entry))

    def _supplied(self, state: State, entry: Entry) -> Effect:
        try:
            op = ops.decode_op(read_content(entry.content, self._core.segments))
        except Corrupt as error:
            reason = f"it had its effect, and what it was cannot be read: {error}"
            return Effect(Failed(error=reason, category="server"))
        return Effect(loaded(state.name, op))


def _digest(content: Content) -> str:
    """A hash of bytes, wherever they are."""
    if content.place is not None:
        return content.place.hash
    return xxhash.xxh3_128_hexdigest(content.inline or b"")
