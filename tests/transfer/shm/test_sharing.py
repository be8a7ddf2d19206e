"""Many processes and threads, one key; forks; the folder itself."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Denied, Mistake, NotFound
from holdfast.transfer import Store, connect, shm
from holdfast.transfer.shm.folder import SHARED
from holdfast.transfer.shm.locks import Locks
from transfer.outcomes import together

from .children import QUICK
from .conftest import Opener
from .family import fresh_name, session, start

OPTIONS = "?budget=16M&segment=1M"


def test_two_writers_of_one_key(name: str, opener: Opener, tmp_path: Path) -> None:
    """However two processes race, everybody ends with the highest generation, and one value."""
    store = opener(OPTIONS)
    keys = [f"k-{n}" for n in range(10)]
    args: dict[str, Any] = {"url": f"shm://{name}", "keys": keys, "rounds": 150}
    with (
        start("racer", folder=tmp_path, seed=1, **args) as one,
        start("racer", folder=tmp_path, seed=2, **args) as two,
    ):
        for kid in (one, two):
            kid.hear("ready")
        for kid in (one, two):
            kid.tell()
        ends = [kid.hear("done")["refs"] for kid in (one, two)]
    for reader in (store, opener()):
        found = {stored.key: stored.generation for stored in reader.scan()}
        assert found == {key: max(end[key] for end in ends) for key in keys}
        assert reader.stat().keys == len(keys)
    # All that was replaced is dead: one more put finds and buries what a race left.
    store.put(dict.fromkeys(keys, b""))
    newcomer = session(opener())
    newcomer.look_up(keys)
    assert sum(one.living() for one in newcomer.catalog.segments.values()) == len(keys)


def test_generations(opener: Opener) -> None:
    """The highest generation wins; a deleted one does not stand in the way of a lower one."""
    store, other = opener(OPTIONS), opener()
    high = store.put({"x": b"high"}, generation=10)["x"]
    other.put({"x": b"low"}, generation=8)
    other.put({"x": b"low"}, generation=9)
    assert store.get(["x"])["x"] == other.get([high])["x"] == b"high"
    assert store.delete([high]) == {"x": True}
    assert other.exists(["x"]) == {"x": False}
    low = other.put({"x": b"low"}, generation=9)["x"]
    assert store.get([low])["x"] == b"low"
    again = store.put({"x": b"again"}, generation=9)["x"]
    assert store.get(["x"])["x"] == other.get([again])["x"] == b"again"
    assert other.delete([high]) == {"x": False}
    assert other.delete(["x"]) == {"x": True}
    assert not opener().exists(["x"])["x"]


def test_a_late_delete(name: str, opener: Opener, tmp_path: Path) -> None:
    """A delete that is stopped before its lock does not hit what has come in the meantime."""
    store = opener("?budget=1M&segment=128K")
    url = f"shm://{name}"
    args: dict[str, Any] = {"url": url, "sizes": {"other": 1}, "generation": 1}
    store.put({f"a-{n}": bytes(1000) for n in range(50)})
    with start("keeper", folder=tmp_path, fault="shm.delete.found:stop", **args) as deleter:
        deleter.hear("ready")
        deleter.tell(",".join(f"a-{n}" for n in range(50)))
        deleter.stopped()
        store.delete([f"a-{n}" for n in range(50)])
        for _ in range(3):
            for turn in range(8):
                store.put({f"b-{turn}-{n}": bytes(1000) for n in range(60)})
        deleter.child.signal(signal.SIGCONT)
        assert not any(deleter.hear("deleted")["answer"].values())
    assert store.stat().keys == 1 + 8 * 60
    assert len(store.get([f"b-{turn}-{n}" for turn in range(8) for n in range(60)])) == 480


def test_fork(opener: Opener) -> None:
    """A child of a fork owns nothing of its parent's: both go on, and neither hurts the other."""
    store = opener(OPTIONS)
    refs = store.put({"a": b"1" * 100_000, "b": b"2"})
    mine = set(session(store).writer.slots)
    with store.view(["a"]) as values:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                assert store.get(refs.values())["a"] == b"1" * 100_000
                store.put({"child": b"3"})
                assert set(session(store).writer.slots).isdisjoint(mine)
                store.delete(["b"])
                os.write(write, b"x")
                signal.pause()
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        assert os.read(read, 1) == b"x", "the child failed"
        os.close(read)
        assert store.get(["child"])["child"] == b"3"
        assert not store.exists(["b"])["b"]
        # The child lives, and yet our locks go with us and not with it.
        store.delete(["a"])
        assert values["a"] == b"1" * 100_000
    ours = session(store)
    ours.writer.close_segment()
    name = next(iter(ours.catalog.segments.values())).name
    with ours.locks.held(name, exclusive=True, wait=False) as alone:
        assert alone, "the child holds a lock of its parent"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    """A link that leaves the folder, and one that others may enter."""
    base = Path(f"/dev/shm/holdfast-{os.geteuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    name = fresh_name()
    (base / name).symlink_to(tmp_path)
    try:
        with pytest.raises(Denied):
            connect(f"shm://{name}")
        (base / name).unlink()
        (base / name).mkdir(mode=0o755)
        (base / name).chmod(0o755)
        with pytest.raises(Denied):
            connect(f"shm://{name}")
    finally:
        (base / name).unlink() if (base / name).is_symlink() else (base / name).rmdir()


def test_opened_while_it_is_removed(name: str) -> None:
    """Opening and removing race: whoever has it open has the store that others see."""
    over = time.monotonic() + 1.0

    def use(number: int) -> None:
        while time.monotonic() < over:
            with connect(f"shm://{name}?budget=1M", QUICK) as one:
                one.put({f"k-{number}": b"x"})
                with connect(f"shm://{name}", QUICK) as two:
                    assert two.exists([f"k-{number}"])[f"k-{number}"], "two stores of one name"

    def clear() -> None:
        while time.monotonic() < over:
            try:
                shm.remove(name)
            except NotFound:
                time.sleep(0.001)

    together([partial(use, 0), partial(use, 1), clear, clear])


@pytest.mark.parametrize("when", ["before its lock is there", "after its lock was taken"])
def test_opened_between_look_and_removal(
    name: str, opener: Opener, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Who removes a store looks and acts; a store that is opened in between is not removed."""
    place = SHARED / f"holdfast-{os.geteuid()}" / name
    opener("?budget=1M").close()
    if when.startswith("before"):
        (place / "users").unlink()
    look = Locks.take
    opened: list[Store] = []

    def look_slowly(
        locks: Locks, which: str, *, exclusive: bool, create: bool = False
    ) -> int | None:
        first = exclusive and not opened
        try:
            found = look(locks, which, exclusive=exclusive, create=create)
        except FileNotFoundError:
            if first:
                opened.append(opener("?budget=1M"))
            raise
        if first and when.startswith("after"):
            place.rename(place.with_name(f".gone-{name}"))  # as another remover does
            opened.append(opener("?budget=1M"))
        return found

    monkeypatch.setattr(Locks, "take", look_slowly)
    removed = shm.remove(name)
    assert removed == (not opened)
    assert all((place / "users").exists() for _ in opened)


def test_a_closed_store(opener: Opener) -> None:
    """A closed store says so."""
    store: Store = opener(OPTIONS)
    store.close()
    with pytest.raises(Mistake, match="closed"):
        store.get(["x"])
