"""What a gateway knows of the jobs, and how it makes sure.

A `View` is followed by watch and may lag. `confirm` reads one job from the ledger itself:
concurrent questions about one job share one reading, begun after the question was asked, and
at most `_READS` readings are on their way at a time. What was confirmed counts as long as it is
newer than the view.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from holdfast.errors import TimedOut, UnknownOutcome
from holdfast.jobs.store import Jobs, Seen
from holdfast.jobs.view import View, keep

__all__ = ["Routes"]

_READS = 64


class Routes:
    """The routes of one run. `run` keeps them; `find` and `confirm` answer."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._view = View(jobs.keys)
        self._fresh: dict[str, tuple[int, Seen | None]] = {}
        """What was read from the ledger after the view's revision."""
        self._reading: dict[str, asyncio.Task[Seen | None]] = {}
        self._next: dict[str, asyncio.Task[Seen | None]] = {}
        self._asking: dict[asyncio.Task[Seen | None], int] = {}
        self._slots = asyncio.Semaphore(_READS)
        self._listeners: dict[str, dict[Callable[[], object], None]] = {}
        """Whom to call when something is heard of a job, in the order of their coming: a seed
        tells one story."""
        self.ready = asyncio.Event()
        """Set once everything has been read for the first time."""

    async def run(self) -> None:
        """Follow the jobs, for ever."""
        await keep(self._jobs.runtime, self._view, self._changed)

    def _changed(self, names: set[str]) -> None:
        self.ready.set()
        revision = self._view.revision
        for name in [name for name, (read_at, _) in self._fresh.items() if read_at <= revision]:
            del self._fresh[name]
        for name in sorted(names):
            for listener in list(self._listeners.get(name, ())):
                listener()

    def find(self, account: str, job: str) -> Seen | None:
        """What is known of a job without asking; None: nothing."""
        name = f"{account}/{job}"
        if name in self._fresh:
            return self._fresh[name][1]
        return self._view.jobs.get(name)

    async def confirm(self, account: str, job: str, timeout_s: float) -> Seen | None:
        """Read the job now. Raises `Retriable` when the ledger does not answer in time."""
        name = f"{account}/{job}"
        # A reading that has begun already may have missed what the caller knows of.
        task = self._next.get(name)
        if task is None:
            task = self._next[name] = self._jobs.runtime.spawn(
                self._read(name, account, job, self._reading.get(name)), name=f"confirms {name}"
            )
        self._asking[task] = self._asking.get(task, 0) + 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise TimedOut(f"the ledger did not tell of {name} within {timeout_s:.1f} s") from None
        except UnknownOutcome as error:  # of a read: it took no effect
            raise TimedOut(str(error)) from error
        finally:
            self._asking[task] -= 1
            if not self._asking[task]:
                del self._asking[task]
                if not task.done():  # nobody waits for it any more
                    task.cancel()
                    if self._next.get(name) is task:
                        del self._next[name]

    async def _read(
        self, name: str, account: str, job: str, before: "asyncio.Task[Seen | None] | None"
    ) -> Seen | None:
        if before is not None:
            await asyncio.wait((before,))
        task = self._reading[name] = self._next.pop(name)
        try:
            async with self._slots:
                revision, seen = await self._jobs.look(account, job)
        finally:
            if self._reading.get(name) is task:
                del self._reading[name]
        known_at = max(self._view.revision, self._fresh.get(name, (0, None))[0])
        # What nobody has ever heard of is not kept: names cost an attacker nothing.
        if revision > known_at and (seen is not None or self.find(account, job) is not None):
            self._fresh[name] = (revision, seen)
        return seen

    @contextlib.contextmanager
    def listening(self, account: str, job: str, listener: Callable[[], object]) -> Iterator[None]:
        """Call somebody whenever something is heard of a job."""
        listeners = self._listeners.setdefault(f"{account}/{job}", {})
        listeners[listener] = None
        try:
            yield
        finally:
            del listeners[listener]
            if not listeners:
                self._listeners.pop(f"{account}/{job}", None)

    async def changed(self, account: str, job: str, timeout_s: float) -> None:
        """Wait until something is heard of a job, or the time is over."""
        bell = asyncio.Event()
        with self.listening(account, job, bell.set), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await bell.wait()
