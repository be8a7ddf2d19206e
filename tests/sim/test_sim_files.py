"""Simulated files: what a loss of power leaves of them, and what takes room."""

import errno
import random
from collections import Counter
from collections.abc import Callable

import pytest

from holdfast.sim.files import SimFiles, SimInode
from holdfast.sim.loop import Owner

DATA = bytes(range(1, 41))


def _files() -> SimFiles:
    """Two folders with a file in the first; all of it durable."""
    files = SimFiles(lambda: 0.0)
    for name in ("a", "b"):
        files.make(files.root, name)
    files.sync(files.root)
    files.sync_file(_write(files, "a", "old"))
    files.sync(files.folder("a"))
    return files


def _write(files: SimFiles, folder: str, name: str, data: bytes = DATA) -> SimInode:
    inode = files.create(files.folder(folder), name)
    files.fill(inode, data, name)
    return inode


def _outcomes(act: Callable[[SimFiles], object], seeds: int = 200) -> Counter[tuple[str, ...]]:
    """Do something, lose the power; which files are there then, how often."""
    seen: Counter[tuple[str, ...]] = Counter()
    for seed in range(seeds):
        files = _files()
        act(files)
        files.lose_power(random.Random(seed))
        for path, data in files.tree().items():
            assert path == "a/torn" or data in (DATA, b"new"), f"seed {seed}: {path} is {data!r}"
        seen[tuple(sorted(files.tree()))] += 1
    return seen


def test_what_was_synced_stays() -> None:
    def act(files: SimFiles) -> None:
        files.sync_file(_write(files, "b", "new"))
        files.sync(files.folder("b"))
        files.unlink(files.folder("a"), "old")
        files.sync(files.folder("a"))

    assert set(_outcomes(act)) == {("b/new",)}


def test_a_name_may_vanish_or_come_back_until_its_folder_is_synced() -> None:
    def create(files: SimFiles) -> None:
        files.sync_file(_write(files, "b", "new"))

    def delete(files: SimFiles) -> None:
        files.unlink(files.folder("a"), "old")

    assert set(_outcomes(create)) == {("a/old",), ("a/old", "b/new")}
    assert set(_outcomes(delete)) == {("a/old",), ()}


def test_changes_of_several_names_are_each_for_itself() -> None:
    def act(files: SimFiles) -> None:
        for name in ("x", "y"):
            files.sync_file(_write(files, "b", name))

    assert set(_outcomes(act)) == {
        ("a/old",),
        ("a/old", "b/x"),
        ("a/old", "b/y"),
        ("a/old", "b/x", "b/y"),
    }


@pytest.mark.parametrize("synced", ["", "a", "b"])
def test_a_rename_between_folders_happened_or_not_and_never_half(synced: str) -> None:
    """The file is at one of its two places; once either folder is synced, at the new one."""

    def act(files: SimFiles) -> None:
        files.rename("a/old", "b/new")
        if synced:
            files.sync(files.folder(synced))

    assert set(_outcomes(act)) == ({("b/new",)} if synced else {("a/old",), ("b/new",)})


def test_changes_of_one_name_keep_their_order() -> None:
    """Out of the way, then something else in its place: the first is never lost."""

    def act(files: SimFiles) -> None:
        files.sync_file(_write(files, "b", "next"))
        files.sync(files.folder("b"))
        files.rename("a/old", "b/trash")
        files.rename("b/next", "a/old")

    assert set(_outcomes(act)) == {
        ("a/old", "b/next"),
        ("b/next", "b/trash"),
        ("a/old", "b/trash"),
    }


def test_a_folder_may_be_renamed_and_be_empty_if_it_was_not_synced_itself() -> None:
    """The reason to sync a folder before it is renamed into view."""

    def act(files: SimFiles) -> None:
        files.make(files.root, "tmp")
        files.sync_file(_write(files, "tmp", "new"))
        files.rename("tmp", "seen")
        files.sync(files.root)

    assert set(_outcomes(act)) == {("a/old",), ("a/old", "seen/new")}


def test_replacing_a_file_leaves_the_old_or_the_new() -> None:
    """Moved over: one or the other, whole. (Both have been synced themselves.)"""
    contents: Counter[bytes | None] = Counter()

    def act(files: SimFiles) -> None:
        files.sync_file(_write(files, "a", ".put", b"new"))
        files.rename("a/.put", "a/old")

    for seed in range(100):
        files = _files()
        act(files)
        files.lose_power(random.Random(seed))
        contents[files.content("a/old")] += 1
    assert set(contents) == {DATA, b"new"}


def test_content_that_was_not_synced_is_whole_or_torn_or_zeros_or_nothing() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(200):
        files = _files()
        _write(files, "a", "torn")
        files.sync(files.folder("a"))
        files.lose_power(random.Random(seed))
        data = files.content("a/torn")
        assert data is not None
        if data == DATA:
            kinds["whole"] += 1
        elif not data:
            kinds["nothing"] += 1
        elif len(data) == len(DATA):
            assert data.rstrip(b"\0") == DATA[: len(data.rstrip(b"\0"))]
            kinds["zeros"] += 1
        else:
            assert data == DATA[: len(data)]
            kinds["torn"] += 1
    assert min(kinds[kind] for kind in ("whole", "nothing", "zeros", "torn")) > 10


def test_no_file_ever_loses_all_its_names_by_being_moved() -> None:
    """Random moves, links and syncs of durable files: each is there once power is back."""
    for seed in range(300):
        luck = random.Random(seed)
        files = SimFiles(lambda: 0.0)
        for folder in "abc":
            files.make(files.root, folder)
        files.sync(files.root)
        for number in range(4):
            files.sync_file(_write(files, "a", f"f{number}", b"%d" % number))
        files.sync(files.folder("a"))
        for step in range(luck.randrange(20)):
            path = luck.choice(sorted(files.tree()))
            new = luck.choice("abc") + f"/g{step % 6}"
            if luck.random() < 0.3:
                files.sync(files.folder(luck.choice("abc")))
            elif files.content(new) is None:
                files.rename(path, new)
        files.lose_power(luck)
        assert sorted(files.tree().values()) == [b"0", b"1", b"2", b"3"], f"seed {seed}"


def test_numbers_of_inodes_are_used_again() -> None:
    """A file that has the number of another need not be it; not while that is open, though."""
    files = _files()
    folder = files.folder("a")
    old = files.file(folder, "old")
    handle = files.open(old, Owner())
    files.unlink(folder, "old")
    assert files.create(folder, "one").number != old.number
    files.close(handle)
    files.close(handle)
    assert files.create(folder, "two").number == old.number
    assert files.create(folder, "three").number != old.number


def test_room_is_taken_by_names_and_by_the_open_files_of_the_living() -> None:
    files = SimFiles(lambda: 0.0, capacity=100)
    holder = Owner()
    inode = _write(files, "", "f", bytes(60))
    files.link(files.root, "g", inode)
    assert files.used() == 60
    handle = files.open(inode, holder)
    files.unlink(files.root, "f")
    files.unlink(files.root, "g")
    assert files.used() == 60
    with pytest.raises(OSError, match="No space") as caught:
        _write(files, "", "h", bytes(50))
    assert caught.value.errno == errno.ENOSPC
    holder.dead = True
    assert files.used() == 0
    holder.dead = False
    files.close(handle)
    assert files.used() == 0
