"""Playing schedules on every core, with the same result as one after the other.

Seeds are dealt out in small runs and looked at in their order, so that the failure that is
reported is the one with the lowest seed, however many processes play.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from holdfast import proc
from holdfast.sim.runner import Make, Summary, search

__all__ = ["Find", "Pool"]

Find = Callable[[str], Make]
"""Finds a protocol by its name: a function of a module, because every process imports it."""

_LONGEST_RUN = 20
"""Seeds per run: long enough to be worth a message, short enough to stop soon after a failure."""


class Pool:
    """Processes that play schedules; a context manager. With one job, none are started."""

    def __init__(self, find: Find, jobs: int | None = None) -> None:
        self.find = find
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        if self.jobs > 1:
            self._executor = ProcessPoolExecutor(
                self.jobs,
                get_context("spawn"),
                initializer=proc.die_with_parent,
                initargs=(os.getpid(),),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def search(self, name: str, seeds: range, *, steps: int | None = None) -> Iterator[Summary]:
        """Play `name` until a schedule breaks it; yields what has been shown, now and then."""
        if self._executor is None:
            yield from search(self.find(name), seeds, steps=steps)
            return
        play = partial(_play, self.find, name, steps=steps)
        with _uninterrupted():  # it may start processes
            found = self._executor.map(play, _runs(seeds))
        total: Summary | None = None
        for more in found:
            if total is not None:
                more.table.add(total.table)
                more.schedules += total.schedules
            total = more
            yield total
            if total.failure is not None:
                return


def _runs(seeds: range) -> Iterator[range]:
    """Short runs first: most broken protocols break at once."""
    begin = 0
    while begin < len(seeds):
        length = 1 + min(begin // 4, _LONGEST_RUN)
        yield seeds[begin : begin + length]
        begin += length


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a process that is half started would be lost to the pool, and would complain.

    Masked, so that a process started meanwhile never hears of Ctrl-C (it is for the parent, which
    ends it); handled, because another thread of ours may still be given the signal.
    """
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            raise KeyboardInterrupt


def _play(find: Find, name: str, seeds: range, *, steps: int | None) -> Summary:
    *_, last = search(find(name), seeds, steps=steps)
    return last
