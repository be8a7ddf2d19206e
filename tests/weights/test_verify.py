"""Verifying a channel: whatever was changed behind our back is found and named."""

import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast import ledger
from holdfast.errors import Corrupt, Gone, NotFound
from holdfast.ledger import Ledger
from holdfast.tensors import sources
from holdfast.weights import Publisher, Retention, Subscriber, write_part
from holdfast.weights.channel import Channel
from holdfast.weights.disk import OpenFile
from holdfast.weights.local import LocalDisk, LocalFolder
from holdfast.weights.manifest import MANIFEST
from holdfast.weights.stfile import chunks
from holdfast.weights.verify import Finding, verify

SHARD = "model.safetensors"
FIRST = "model-rank00000-00001.safetensors"
SECOND = "model-rank00001-00001.safetensors"


def _model(seed: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(500).astype(np.float32) for name in ("alpha", "beta")}


class CountingFolder(LocalFolder):
    """Counts how often each file's bytes are taken."""

    views: Counter[int]

    async def open(self, name: str) -> "CountingFile":  # type: ignore[override]
        return CountingFile(await super().open(name), self.views)


class CountingFile(OpenFile):
    def __init__(self, file: OpenFile, views: Counter[int]) -> None:
        self._file, self._views = file, views
        self.bytes, self.inode = file.bytes, file.inode

    def view(self) -> memoryview:
        self._views[self.inode] += 1
        return self._file.view()

    def is_changed(self) -> bool:
        return self._file.is_changed()

    def close(self) -> None:
        self._file.close()


class CountingDisk(LocalDisk):
    """The real disk; `before` is done each time before a folder is opened."""

    def __init__(self) -> None:
        self.views: Counter[int] = Counter()
        self.before: Callable[[str], Awaitable[None]] | None = None

    async def folder(self, path: str) -> LocalFolder:
        if self.before is not None:
            await self.before(path)
        folder = await super().folder(path)
        folder.__class__ = CountingFolder
        assert isinstance(folder, CountingFolder)
        folder.views = self.views
        return folder


class Bench:
    """A channel with three versions that share one file (0 to 2) and one of two ranks (3)."""

    def __init__(self, root: Path, led: Ledger) -> None:
        self.root, self.ledger = root, led
        self.folder = root / "policy"
        self.disk = CountingDisk()
        self.channel = Channel(root, led, "policy", disk=self.disk)
        self.book = self.channel.book("test")
        self.publisher = Publisher(root, led, "policy", Retention(keep_last=9))

    async def fill(self) -> None:
        await self.publisher.open()
        for number in range(3):
            files = {"config.json": f'{{"step": {number}}}'.encode()}
            await self.publisher.publish(number, _model(1), files=files)
        ticket = await self.publisher.begin(3)
        for rank, name in enumerate(("one", "two")):
            tensors = {name: _model(2)["alpha"] * (rank + 1)}
            await write_part(self.disk, ticket, rank, tensors)
        await self.publisher.finish(ticket, 2)

    async def verify(self, *numbers: int, mark: bool = False) -> list[Finding]:
        return await verify(self.channel, self.book, numbers or None, mark=mark)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with ledger.open(f"sqlite:///{tmp_path}/ledger.db") as led:
        found = Bench(tmp_path, led)
        await found.fill()
        yield found


def _flip(path: Path, at: int) -> None:
    """Change one bit in place, in whatever shares the file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


async def test_a_sound_channel_is_read_once(bench: Bench) -> None:
    """Nothing is found, every file was read, and no inode twice though three versions share it."""
    inodes = [(bench.folder / f"step_{n}" / SHARD).stat().st_ino for n in range(3)]
    assert len(set(inodes)) == 1, "the versions share the file"
    bench.disk.views.clear()
    seen: list[tuple[int, int]] = []
    found = await verify(
        bench.channel, bench.book, progress=lambda done, total: seen.append((done, total))
    )
    assert found == []
    files = {
        path.stat().st_ino
        for path in bench.folder.glob("step_*/*")
        if path.name not in ("STABLE", MANIFEST)
    }
    assert bench.disk.views == dict.fromkeys(files, 1)
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)


async def test_a_flipped_bit_is_told_for_every_version_that_shares_it(bench: Bench) -> None:
    """Wherever it is: file and tensor are named, for all three versions and no other."""
    path = bench.folder / "step_1" / SHARD
    seed = random.randrange(2**32)
    print("seed", seed)
    for at in random.Random(seed).sample(range(path.stat().st_size), 20):
        _flip(path, at)
        found = await bench.verify()
        assert [(one.version, one.problem, one.file) for one in found] == [
            (number, "bytes", SHARD) for number in range(3)
        ], f"byte {at}"
        assert all(one.damaged and one.unfit for one in found)
        assert [one.detail.partition(": ")[0] for one in found] == [
            f"step_{number}/{SHARD}" for number in range(3)
        ]
        _flip(path, at)
    assert await bench.verify() == []
    _flip(path, path.stat().st_size - 1)
    assert [one.detail for one in await bench.verify(0, 2)] == [
        f"step_0/{SHARD}: tensor beta differs",
        f"step_2/{SHARD}: tensor beta differs",
    ]


async def _damage(bench: Bench, what: str) -> None:
    folder = bench.folder / "step_3"
    match what:
        case "truncated shard":
            with (folder / FIRST).open("r+b") as file:
                file.truncate(700)
        case "emptied shard":
            (folder / FIRST).write_bytes(b"")
        case "missing tensor":
            other = sources({"else": _model(2)["alpha"]})
            (folder / FIRST).write_bytes(b"".join(chunks(other)))
        case "swapped shards":
            (folder / FIRST).rename(folder / "x")
            (folder / SECOND).rename(folder / FIRST)
            (folder / "x").rename(folder / SECOND)
        case "missing shard":
            (folder / FIRST).unlink()
        case "a folder instead":
            (folder / FIRST).unlink()
            (folder / FIRST).mkdir()
        case "a link instead":
            (folder / FIRST).rename(bench.root / "elsewhere")
            (folder / FIRST).symlink_to(bench.root / "elsewhere")
        case "changed manifest":
            raw = (folder / MANIFEST).read_bytes()
            (folder / MANIFEST).write_bytes(raw.replace(b'"one"', b'"own"'))
        case "another version's manifest":
            shutil.copy(bench.folder / "step_2" / MANIFEST, folder / MANIFEST)
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "no folder":
            shutil.rmtree(folder)
        case "no marker":
            (folder / "STABLE").unlink()
        case "another marker":
            shutil.copy(bench.folder / "step_2" / "STABLE", folder / "STABLE")
        case "extra file":
            (folder / "extra.safetensors").write_bytes(b"x")


DAMAGES = [
    ("truncated shard", [("bytes", FIRST, "it has 700 bytes instead of")]),
    ("emptied shard", [("bytes", FIRST, "it has 0 bytes instead of")]),
    ("missing tensor", [("bytes", FIRST, "tensor one is missing, tensor else is extra")]),
    (
        "swapped shards",
        [
            ("bytes", FIRST, "tensor one is missing, tensor two is extra"),
            ("bytes", SECOND, "tensor two is missing, tensor one is extra"),
        ],
    ),
    ("missing shard", [("missing", FIRST, "is missing, with the tensors one")]),
    ("a folder instead", [("bytes", FIRST, "cannot be read: Is a directory")]),
    ("a link instead", [("bytes", FIRST, "cannot be read")]),
    ("changed manifest", [("manifest", MANIFEST, "is not the manifest that was published")]),
    (
        "another version's manifest",
        [("manifest", MANIFEST, "is not the manifest that was published")],
    ),
    ("no manifest", [("manifest", MANIFEST, "cannot be read: No such file")]),
    ("no folder", [("folder", "", "step_3 is missing")]),
    ("no marker", [("marker", "STABLE", "is missing: readers that wait for it")]),
    ("another marker", [("marker", "STABLE", "is of other contents")]),
    ("extra file", [("extra", "extra.safetensors", "does not belong to the version")]),
]


@pytest.mark.parametrize(("what", "wanted"), DAMAGES)
async def test_each_kind_of_damage_is_named(
    bench: Bench, what: str, wanted: list[tuple[str, str, str]]
) -> None:
    """The version, the file and what is wrong with it; nothing else is told."""
    await _damage(bench, what)
    found = await bench.verify()
    assert [(one.version, one.problem, one.file) for one in found] == [
        (3, problem, file) for problem, file, _ in wanted
    ]
    for one, (problem, _, words) in zip(found, wanted, strict=True):
        assert words in one.detail
        assert one.damaged == (problem != "extra")
        assert one.unfit == (problem not in ("extra", "marker"))


async def test_folders_in_nobodys_book(bench: Bench) -> None:
    """They are told of, but nothing is damaged, also by what is about to be published."""
    shutil.copytree(bench.folder / "step_1", bench.folder / "step_7")  # beyond the head
    assert await bench.verify() == []
    await bench.publisher.publish(8, _model(1))
    shutil.copytree(bench.folder / "step_1", bench.folder / "step_6")
    (bench.folder / "step_5").mkdir()
    (bench.folder / "step_5" / "model.safetensors").write_bytes(b"theirs")
    found = await bench.verify()
    assert [(one.version, one.problem, one.damaged) for one in found] == [
        (5, "leftover", False),
        (6, "leftover", False),
    ]
    assert "was not written by Holdfast" in found[0].detail
    assert "in nobody's book" in found[1].detail


async def test_marked_versions_are_not_loaded_any_more(bench: Bench) -> None:
    """A pin says Corrupt with the reason; the newest that is sound counts as the newest."""
    _flip(bench.folder / "step_3" / FIRST, 300)
    async with Subscriber(bench.root, bench.ledger, "policy", "r0") as subscriber:
        newest = await subscriber.latest()
        assert newest is not None
        assert newest.version == 3
        assert len(await bench.verify()) == 1
        assert (await bench.book.view()).marks == {}, "not asked to mark"
        await bench.verify(mark=True)
        with pytest.raises(Corrupt, match=f"step_3/{FIRST}"):
            async with subscriber.pin(3):
                pass
        newest = await subscriber.latest()
        assert newest is not None
        assert newest.version == 2
        async with subscriber.pin() as pin:
            assert pin.number == 2
    assert list((await bench.book.view()).marks) == [3]


async def test_what_is_only_untidy_is_not_marked(bench: Bench) -> None:
    """Weights that can still be loaded are not taken from anybody."""
    await _damage(bench, "no marker")
    (bench.folder / "step_2" / "extra").write_bytes(b"x")
    assert len(await bench.verify(mark=True)) == 2
    assert (await bench.book.view()).marks == {}


async def test_a_version_that_is_swept_meanwhile_is_not_missing(bench: Bench) -> None:
    """Between reading the book and opening the files everything old goes: nothing is found."""
    sweeping = Publisher(bench.root, bench.ledger, "policy", Retention(keep_last=1))

    async def sweep(path: str) -> None:
        if path.endswith("step_1") and bench.disk.views:
            bench.disk.before = None
            await sweeping.open()
            assert not (bench.folder / "step_1").exists()

    bench.disk.before = sweep
    bench.disk.views.clear()
    assert await bench.verify() == []
    assert bench.disk.before is None, "the sweep did happen in the middle"


async def test_numbers(bench: Bench) -> None:
    """Only what was asked for is verified; a number that is not there is said so."""
    _flip(bench.folder / "step_3" / FIRST, 300)
    assert await bench.verify(0, 1) == []
    assert [one.version for one in await bench.verify(1, 3)] == [3]
    with pytest.raises(NotFound, match="version 99 was not published"):
        await bench.verify(99)
    sweeping = Publisher(bench.root, bench.ledger, "policy", Retention(keep_last=1))
    await sweeping.open()
    with pytest.raises(Gone, match="version 1 was deleted"):
        await bench.verify(1)
