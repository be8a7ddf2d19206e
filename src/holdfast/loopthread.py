"""A thread that runs an event loop, for code without one of its own.

The synchronous faces of the ledger and of the weights hand their work to such a thread and
wait for the answer. May be used from several threads at once; not from the loop itself.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.errors import Mistake

__all__ = ["LoopThread", "waiting"]

P = ParamSpec("P")
T = TypeVar("T")


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The same method of an object's asynchronous `twin`; it waits for the answer.

    The object has a `run`, which hands work to the loop that the twin belongs to.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **how: P.kwargs) -> T:
        answer: T = self.run(getattr(self.twin, method.__name__)(*args, **how))
        return answer

    return call


class LoopThread:
    """Runs coroutines. `stop` ends it; whoever opened things in it closes them first."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the loop, and wait for it."""
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            raise Mistake(
                "this object is closed: open another one"
                if self._loop.is_closed()
                else "a call that waits cannot be made from the event loop that does the work"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: nobody takes the answer any more
            raise

    def stop(self) -> None:
        """End the thread. Stopping twice does no harm."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
