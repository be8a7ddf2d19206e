"""Views and gets of processes that are stopped while the writer goes on."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import NoRoom
from holdfast.transfer import Store

from .children import content
from .conftest import Opener
from .family import start

BUDGET = 8 << 20
OPTIONS = f"?budget={BUDGET}&segment=1M"
SIZE = 300_000


def _wrap(store: Store, times: int, luck: random.Random) -> None:
    """Fill the whole budget so many times."""
    for n in range(times * BUDGET // (4 * SIZE)):
        store.put({f"turn-{n % 3}-{k}": luck.randbytes(SIZE) for k in range(4)})


def test_stopped_in_a_view(name: str, opener: Opener, tmp_path: Path, seed: int) -> None:
    """A view that is stopped while the writer wraps ten times sees the bytes it was given.

    Its values have been deleted meanwhile. When the viewer is killed, its memory is free.
    """
    store, luck = opener(OPTIONS), random.Random(seed)
    keys = ["a", "b", "c"]
    values = {k: np.frombuffer(content(k, 5, SIZE), np.uint8) for k in keys}
    store.put(values, generation=5)
    url = f"shm://{name}"
    with start(
        "viewer", folder=tmp_path, url=url, keys=keys, generation=5, size=SIZE, rounds=3
    ) as viewer:
        viewer.hear("ready")
        viewer.child.signal(signal.SIGSTOP)
        viewer.stopped()
        store.delete(keys)
        _wrap(store, 10, luck)
        viewer.child.signal(signal.SIGCONT)
        viewer.tell()
        assert viewer.hear("read")["right"]
        viewer.child.signal(signal.SIGSTOP)
        viewer.stopped()
        _wrap(store, 1, luck)
        viewer.tell()
        viewer.child.signal(signal.SIGCONT)
        assert viewer.hear("read")["right"]
        viewer.kill()
    store.delete([one.key for one in store.scan()])
    refs = store.put({f"full-{n}": luck.randbytes(SIZE) for n in range(18)})
    assert len(refs) == 18


def test_a_view_holds_its_segment_and_says_so(opener: Opener) -> None:
    """When room is short because of a view, the error names the segment."""
    store, reader = opener(OPTIONS), opener()
    store.put({f"v-{n}": bytes(SIZE) for n in range(18)})
    with reader.view(["v-0", "v-10"]):
        store.delete([f"v-{n}" for n in range(18)])
        answer: dict[str, Exception | None] = {}
        for n in range(18):
            answer |= store.backend.put(store._frames({f"w-{n}": bytes(SIZE)}, None))
        failures = [one for one in answer.values() if one is not None]
        assert 1 <= len(failures) <= 12
        assert isinstance(failures[0], NoRoom)
        assert "in use by a view or a writer: s0-" in str(failures[0])
        assert f"of {BUDGET} bytes are taken, by " in str(failures[0])
    store.put({"after": bytes(SIZE), "after-2": bytes(SIZE)})


def test_writing_to_a_view_is_private(opener: Opener) -> None:
    """Nobody else sees what is written to a tensor of a view, not even a later view."""
    store, reader = opener(OPTIONS), opener()
    ref = store.put({"x": np.arange(100_000)})["x"]
    with reader.view([ref]) as values:
        values["x"][:] = 7
    for one in (store, reader):
        assert (one.get([ref])["x"] == np.arange(100_000)).all()
        with one.view(["x"]) as values:
            assert (values["x"] == np.arange(100_000)).all()
            assert values["x"].ctypes.data % 64 == 0


@pytest.mark.parametrize("turn", range(3))
def test_stopped_in_a_get(name: str, opener: Opener, tmp_path: Path, seed: int, turn: int) -> None:
    """A get that is stopped anywhere while the writer wraps gives right bytes or none."""
    store, luck = opener(OPTIONS), random.Random(seed + turn)

    def put(generation: int) -> None:
        value = generation.to_bytes(8, "little") + content("x", generation, SIZE)
        store.put({"x": value}, generation=generation)

    put(1)
    with start("getter", folder=tmp_path, url=f"shm://{name}", key="x") as getter:
        getter.hear("ready")
        for generation in range(2, 30):
            getter.tell()
            # Somewhere in the middle: spin for a random moment, then stop it.
            for _ in range(luck.randrange(60_000)):
                pass
            os.kill(getter.child.pid, signal.SIGSTOP)
            getter.stopped()
            _wrap(store, 1, luck)
            put(generation)
            os.kill(getter.child.pid, signal.SIGCONT)
            got = getter.hear("got")
            assert got["status"] == "ok"
            assert got["right"]
            assert got["generation"] in (generation - 1, generation)
