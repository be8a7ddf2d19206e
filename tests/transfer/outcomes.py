"""What several tests say about outcomes, and what they do to a store."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import UnionType
from typing import Any

import pytest

from holdfast.chaos.proxy import ProxyThread
from holdfast.errors import BatchFailed, Corrupt, Unavailable
from holdfast.retry import Policy
from holdfast.transfer import Ref, Store, status

ONCE = Policy(attempts=1, deadline_s=10.0)
PATIENT = Policy(attempts=12, base_s=0.001, factor=1.5, max_s=0.02, deadline_s=60.0)
"""For a line that lies all the time."""


@contextmanager
def fails(
    wanted: Mapping[str, type[Exception] | UnionType | str], match: str | None = None
) -> Iterator[None]:
    """Exactly these keys fail, each with an error of this class, or with this status.

    Each error carries its key, begins with it and names no other; that of the batch names all.
    """
    with pytest.raises(BatchFailed, match=match) as caught:
        yield
    found = caught.value.failures
    assert found.keys() == wanted.keys()
    for key, kind in wanted.items():
        if isinstance(kind, str):
            assert status(found[key]) == kind, repr(found[key])
        else:
            assert isinstance(found[key], kind), repr(found[key])
        told = str(found[key])
        assert (getattr(found[key], "key", ""), told.startswith(key)) == (key, True), told
        assert not any(other in told for other in wanted if other not in key), told
        assert key in str(caught.value)


def together(jobs: Iterable[Callable[[], object]]) -> None:
    """Run these in threads at once; what one of them raises is raised here."""
    todo = list(jobs)
    with ThreadPoolExecutor(len(todo)) as pool:
        for done in [pool.submit(job) for job in todo]:
            done.result()


def never_mixed(
    read: Callable[[], None], replace: Callable[[int], None], rounds: int, pause_s: float = 0.0
) -> None:
    """Read so often while somebody replaces what is read, over and over."""
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            replace(step)
            stop.wait(pause_s)

    def look() -> None:
        try:
            for _ in range(rounds):
                read()
        finally:
            stop.set()

    together([write, look])


def lying_values(seed: int) -> dict[str, bytes]:
    """Fifty values for a line that lies."""
    rng = random.Random(seed)
    return {f"k{index}": rng.randbytes(rng.randrange(100, 3000)) for index in range(50)}


def only_right_values(
    store: Store,
    proxy: ProxyThread,
    refs: Mapping[str, Ref],
    values: Mapping[str, Any],
    rounds: int,
) -> None:
    """Whatever the line does to a get, it is right or an error; and nearly all are healed."""
    healed = reported = 0
    for step in range(rounds):
        found = store.get(refs.values() if step % 2 else refs, partial=True)
        for key, value in found.values.items():
            assert value == values[key], f"round {step}: {key} is wrong"
        for error in found.failures.values():
            assert isinstance(error, Corrupt | Unavailable), repr(error)
        assert len(found.values) + len(found.failures) == len(values)
        healed += len(found.values)
        reported += len(found.failures)
    flips = proxy.stats.flips
    assert flips > rounds / 4, "the line did not lie enough"
    assert healed > 0.9 * rounds * len(values)
    print(f"{rounds * len(values)} gets, {flips} flipped bits, {reported} reported, 0 wrong")
