"""Simulated files: what a loss of power leaves of them, and what takes room."""

import random
from collections import Counter

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


def _do(files: SimFiles, steps: str) -> None:
    """Carry out steps such as "create a/x; move a/x b/y; sync b"; what is created is synced."""
    for step in steps.split("; "):
        verb, path, *new = step.split()
        match verb:
            case "create":
                folder, _, name = path.rpartition("/")
                files.sync_file(_write(files, folder, name))
            case "delete":
                files.unlink(*files.place(path))
            case "make":
                files.make(*files.place(path))
            case "move":
                files.rename(path, *new)
            case "sync":
                files.sync(files.folder(path))


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        # What was synced stays; a new name may vanish before, and a deleted one come back.
        ("create b/new; sync b; delete a/old; sync a", ["b/new"]),
        ("create b/new", ["a/old", "a/old b/new"]),
        ("delete a/old", ["a/old", ""]),
        # Changes of several names are each for itself.
        ("create b/x; create b/y", ["a/old", "a/old b/x", "a/old b/y", "a/old b/x b/y"]),
        # A rename never happens by half; once either folder is synced it has happened.
        ("move a/old b/new", ["a/old", "b/new"]),
        ("move a/old b/new; sync a", ["b/new"]),
        ("move a/old b/new; sync b", ["b/new"]),
        # Changes of one name keep their order: what was moved out of the way is never lost.
        (
            "create b/next; sync b; move a/old b/trash; move b/next a/old",
            ["a/old b/next", "b/next b/trash", "a/old b/trash"],
        ),
        # A folder that was not synced before it was renamed into view may be empty.
        ("make tmp; create tmp/new; move tmp seen; sync /", ["a/old", "a/old seen/new"]),
    ],
)
def test_what_a_loss_of_power_leaves(steps: str, left: list[str]) -> None:
    """Each of these names, as luck has it, and nothing else; what is there is whole."""
    seen = set()
    for seed in range(200):
        files = _files()
        _do(files, steps)
        files.lose_power(random.Random(seed))
        assert set(files.tree().values()) <= {DATA}, f"seed {seed}"
        seen.add(" ".join(sorted(files.tree())))
    assert seen == set(left)


def test_replacing_a_file_leaves_the_old_or_the_new() -> None:
    """Moved over: one or the other, whole. (Both have been synced themselves.)"""
    contents = set()
    for seed in range(100):
        files = _files()
        files.sync_file(_write(files, "a", ".put", b"new"))
        files.rename("a/.put", "a/old")
        files.lose_power(random.Random(seed))
        contents.add(files.content("a/old"))
    assert contents == {DATA, b"new"}


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
    """What has no name and no living reader takes none."""
    files, holder = SimFiles(lambda: 0.0, capacity=100), Owner()
    inode = _write(files, "", "f", bytes(60))
    files.link(files.root, "g", inode)
    handle = files.open(inode, holder)
    for name in ("f", "g"):
        assert files.used() == 60
        files.unlink(files.root, name)
    with pytest.raises(OSError, match="No space"):
        _write(files, "", "h", bytes(50))
    holder.dead = True
    assert files.used() == 0
    holder.dead = False
    files.close(handle)
    assert files.used() == 0
