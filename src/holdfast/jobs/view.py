"""All jobs of a run, followed: what hosts and gateways know without asking."""

import contextlib
from collections.abc import Callable

from holdfast.jobs.records import NAME, Keys
from holdfast.jobs.store import Seen, seen
from holdfast.ledger.follow import Step, follow
from holdfast.ledger.runtime import Runtime

__all__ = ["View"]


class View:
    """Jobs by name (account/id), as of `revision`. It lags behind the ledger, by a little."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.jobs: dict[str, Seen] = {}
        self.revision = 0

    def apply(self, step: Step) -> set[str]:
        """Take in one step; returns the names of the jobs that it may have changed."""
        self.revision = step.revision
        records, alives = self._keys.records, self._keys.alives
        if step.change is None:
            keys = [*step.entries, *(records + name for name in self.jobs)]
        else:
            keys = [event.key for event in step.change.events]
        names = {
            key.removeprefix(folder)
            for key in keys
            for folder in (records, alives)
            if key.startswith(folder)
        }
        for name in names:
            self._read(name, step)
        return names

    def _read(self, name: str, step: Step) -> None:
        entry = step.entries.get(self._keys.records + name)
        self.jobs.pop(name, None)
        account, _, job = name.partition("/")
        if entry is not None and NAME.fullmatch(account) and NAME.fullmatch(job):
            alive = step.entries.get(self._keys.alives + name)
            epoch = step.entries.get(self._keys.epochs + name)
            self.jobs[name] = seen(entry, alive, epoch, step.revision)


async def keep(runtime: Runtime, view: View, changed: Callable[[set[str]], None]) -> None:
    """Keep a view up to date, for ever; `changed` hears which jobs to look at."""
    async with contextlib.aclosing(follow(runtime, view._keys.root)) as steps:
        async for step in steps:
            changed(view.apply(step))
