"""An event loop whose time is virtual and whose order is decided by it alone.

It runs asyncio's own tasks and futures, so production code runs in it unchanged. Every
callback belongs to an *owner* (a simulated process, found through the task's context);
an owner can be paused, then everything it had to do waits, or be dead, then it is dropped
without any clean-up, as after SIGKILL. Callbacks that are due at the same time run in the
order in which they were scheduled.
"""

import asyncio
import heapq
import sys
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any, TypeVar

__all__ = ["OWNER", "Owner", "VirtualLoop"]

T = TypeVar("T")
Act = Callable[..., object]

_SPINS_MAX = 100_000


class Owner:
    """A simulated process, as far as the loop is concerned."""

    def __init__(self) -> None:
        self.dead = False
        self.paused_until = 0.0
        self.tasks: list[asyncio.Task[Any]] = []


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class _Handle(asyncio.TimerHandle):
    """A callback with its time; asyncio's own class, so that `asyncio.timeout` takes it."""

    __slots__ = ("owner",)
    owner: Owner | None


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order of their virtual time; never sleeps, never does I/O."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._queue: list[tuple[float, float, int, _Handle]] = []
        self.problems: list[str] = []

    # ---- driving it ------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Run until `until()` is true, nothing is left to do, or time is up."""
        events._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        # A generator that its dead owner left behind is dropped, not closed.
        sys.set_asyncgen_hooks(finalizer=lambda _: None)
        queue = self._queue
        try:
            spins = 0
            while queue:
                when, due, order, handle = heapq.heappop(queue)
                if handle._cancelled:
                    continue
                owner = handle.owner
                if owner is not None:
                    if owner.dead:
                        continue
                    if owner.paused_until > when:
                        heapq.heappush(queue, (owner.paused_until, due, order, handle))
                        continue
                if when > limit_s:
                    heapq.heappush(queue, (when, due, order, handle))
                    return
                if when > self._now:
                    self._now = when
                    spins = 0
                spins += 1
                if spins > _SPINS_MAX:
                    self.problems.append("a process runs in circles while no time passes")
                    return
                handle._run()
                if until():
                    return
        finally:
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def close(self) -> None:
        """Drop whatever is left, without running any of its clean-up code's effects."""
        self._queue.clear()

    # ---- what asyncio's tasks, futures and time-outs call ------------------------

    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._now

    def call_at(  # type: ignore[override]  # asyncio's signature is generic over its arguments
        self, when: float, callback: Act, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a virtual time."""
        handle = _Handle(when, callback, args, self, context)
        handle.owner = OWNER.get() if context is None else context.get(OWNER)
        self._count += 1
        heapq.heappush(self._queue, (when, when, self._count, handle))
        return handle

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Act, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after some virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]  # as above
        self, callback: Act, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback next."""
        return self.call_at(self._now, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """An ordinary future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """An ordinary task, remembered by its owner."""
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # the dead do not clean up
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.tasks.append(task)
        return task

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled handles are dropped when their time comes."""

    def get_debug(self) -> bool:
        """Debugging is off: it would only cost time."""
        return False

    def is_running(self) -> bool:
        """Always, as far as the code inside can tell."""
        return True

    def is_closed(self) -> bool:
        """Never, as far as the code inside can tell."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what a callback raised. (Tasks are looked at by the world itself.)"""
        if "handle" in context:
            error = context.get("exception")
            self.problems.append(f"{type(error).__name__}: {error}")
