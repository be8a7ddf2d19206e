"""A store in shared memory of before: every value is what was put, and there is room for more."""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compat.sides import facts, unpack
from holdfast import transfer
from holdfast.errors import BatchFailed
from holdfast.transfer import Ref
from transfer.samples import SAMPLES, same


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The URL of the store, in shared memory under a name of its own, and what is in it."""
    folder = unpack("store", tmp_path)
    told = facts(folder)
    (folder / "facts.json").unlink()
    name = f"test-{uuid.uuid4().hex[:12]}"
    place = Path("/dev/shm") / f"holdfast-{os.geteuid()}" / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(folder, place)
    place.chmod(0o700)
    yield f"shm://{name}", told["refs"]
    shutil.rmtree(place)


def test_values_are_what_was_put(store: tuple[str, dict[str, Any]]) -> None:
    """By key and by reference; what was deleted stays so; the store is used like any other."""
    url, told = store
    right = {key.replace(" ", "-"): value for key, value in SAMPLES.items()}
    refs = {key: Ref(key, *numbers) for key, numbers in told.items()}
    with transfer.connect(url) as there:
        assert {one.key for one in there.scan()} == set(refs)
        for found in (there.get(list(refs)), there.get(list(refs.values()))):
            wrong = [
                key for key, one in found.items() if not same(one, right[key.partition("/")[2]])
            ]
            assert not wrong, wrong
        assert len(refs) > 100
        with pytest.raises(BatchFailed):
            there.get(["one/deleted"])
        replaced = there.put({"one/bytes": b"after"})["one/bytes"]
        assert replaced.generation > refs["one/bytes"].generation
        assert there.get(["one/bytes"]) == {"one/bytes": b"after"}
        with pytest.raises(BatchFailed) as failed:
            there.get([refs["one/bytes"]])
        (reason,) = failed.value.failures.values()
        assert transfer.status(reason) == "stale"
        assert all(there.delete(list(refs)).values())
        assert there.stat().keys == 0
