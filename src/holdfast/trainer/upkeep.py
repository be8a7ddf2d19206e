"""What must be done from time to time: give up missing numbers, end sessions, forget, sweep.

- A missing number is given up with a tombstone and its (bad) result in one transaction; then
  what waited behind it is carried out.
- Operations that were promised and can no longer be carried out, because their model was
  unloaded or its session has ended, fail: nobody waits for them for ever.
- A sampling session of unnamed weights ends when these are no longer kept; nothing of it is left
  when its results are old. So whoever makes one per step can do so for ever.
- What was saved for a limited time is deleted when that is over.
- The checkpoints of a model that has ended are removed. Models of sessions that were not heard of
  for some time are put aside (`shelf.py`), and nothing of them is lost.
- Results are kept until their session ends, or until they are old and many newer ones are
  there: that a result was sent once does not mean that it was received.
"""

import contextlib

import msgspec

from holdfast import events
from holdfast.errors import Retriable, UnknownOutcome
from holdfast.ledger.records import put
from holdfast.trainer import ops
from holdfast.trainer.core import Core
from holdfast.trainer.ops import Failed
from holdfast.trainer.state import State, checkpoints_of

__all__ = ["Upkeep"]

_SWEEP_EVERY = 15


class Skipped(events.Event, frozen=True, tag="trainer.skipped"):
    """A number was given up: its operation never came."""

    line: str
    number: int


class Upkeep:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def run(self) -> None:
        """Look, for ever."""
        turn = 0
        while True:
            await self._core.runtime.sleep(self._core.policy.upkeep_s)
            with contextlib.suppress(Retriable):
                # Whoever was replaced and has nothing to do would not notice otherwise.
                await self._core.journal.check()
            await self.look()
            turn += 1
            if turn % _SWEEP_EVERY == 1:
                self._core.segments.sweep(self._core.known.places())

    async def look(self) -> None:
        """Do whatever is due."""
        core = self._core
        now = core.runtime.now()
        for name in core.known.overdue(now):
            await self.end_session(name)
        await core.saves.tidy()
        for state in core.known.outdated():
            await core.record(state, ended=True)
        for state in list(core.lines.values()):
            if state.ended:
                await self._retire(state)
                continue
            missing = state.line.missing(now, core.policy.gap_s, core.wall())
            while missing is not None and missing not in (*state.line.entries, *state.pending):
                # Those that are missing right behind it have been missing as long.
                await self._skip(state, missing)
                missing += 1
                if missing > max(state.line.entries):
                    break
            await self._forget(state)
        silent = core.known.silent(core.runtime.now())
        if any(one.session in silent and not one.wanted for one in core.known.in_memory()):
            core.work.set()  # for the runner to put them aside

    async def _skip(self, state: State, number: int) -> None:
        core = self._core
        reason = (
            f"operation {number} did not come for {core.policy.gap_s:g} s while later ones "
            "waited for it: its number was given up"
        )
        skip = ops.Skip(reason=reason)
        events.emit(Skipped(line=state.name, number=number))
        # Whoever comes with it while this is written waits, and gets the same result.
        await core.append(state, number, skip, refused=Failed(error=reason))

    async def end_session(self, name: str) -> None:
        """End a session, with its models and its sampling sessions."""
        core = self._core
        session = core.known.sessions.get(name)
        if session is None or session.ended:
            return
        ended = msgspec.structs.replace(session, ended=True)
        core.known.sessions[name] = ended
        core.known.seen.pop(name, None)
        await core.journal.write(put(core.keys.session(name), ended))
        for state in list(core.lines.values()):
            if state.session == name and not state.ended:
                await core.record(state, ended=True)

    async def _retire(self, state: State) -> None:
        """Of a line that has ended: answer who still waits; forget what is left."""
        core, line = self._core, state.line
        if state.busy:
            return  # what is being carried out will have a result of its own
        for number in [one for one in line.entries if line.is_waiting(one)]:
            if number in line.results or number in line.computed:
                continue
            error = f"{state.name} was unloaded, or its session ended, before this was done"
            result = core.result_of(line.entries[number], Failed(error=error))
            await core.journal.write(put(core.keys.result(state.name, number), result))
            core.settled(state, number, result)
        if line.computed or state.pending or state.saving:
            return  # it comes to its end first
        await core.journal.delete(core.keys.op(state.name, one) for one in line.entries)
        line.entries.clear()
        if state.loaded:
            state.loaded = False
            await core.compute.drop(state.name)
        await self._clear(state)
        over = core.known.sessions[state.session].ended
        before = core.wall() - core.policy.result_s
        old = [n for n, one in line.results.items() if over or (state.sampler and one.at < before)]
        await core.journal.delete(core.keys.result(state.name, one) for one in old)
        for number in old:
            del line.results[number]
        if state.sampler is not None and not line.results:
            await core.journal.delete([core.keys.sampler(state.name)])
            del core.lines[state.name]

    async def _clear(self, state: State) -> None:
        """Remove the checkpoints of a model that has ended: nothing begins from them again."""
        if state.model is None or state.cleared:
            return
        channel = checkpoints_of(state.name)
        with contextlib.suppress(Retriable, UnknownOutcome):  # then with the next look
            newest = await self._core.vault.newest(channel)
            if newest is not None:
                await self._core.vault.drop(channel, newest)
            state.cleared, state.restorable = True, None

    async def _forget(self, state: State) -> None:
        core, line = self._core, state.line
        before = core.wall() - core.policy.result_s
        old = [
            number
            for number in line.old_results(before, core.policy.keep_results)
            if not line.ordered or number <= line.trimmed
        ]
        if not old:
            return
        line.forget(old)
        blocks = {str(block): number for block, number in line.forgotten.items()}
        await core.record(state, forgotten=line.forgotten[0] if state.model else blocks)
        await core.journal.delete(core.keys.result(state.name, one) for one in old)
