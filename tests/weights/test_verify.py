"""Verifying a channel: whatever was changed behind our back is found and named."""

import shutil
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from holdfast.errors import Gone, NotFound
from holdfast.weights import write_part
from holdfast.weights.local import LocalDisk, LocalFolder
from holdfast.weights.manifest import MANIFEST
from holdfast.weights.verify import Finding, verify
from weights import family
from weights.family import House, damage, flip

SHARD = "model.safetensors"
FIRST = "model-rank00000-00001.safetensors"
SECOND = "model-rank00001-00001.safetensors"


def _model(seed: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(500).astype(np.float32) for name in ("alpha", "beta")}


class Interrupted(LocalDisk):
    """The real disk; `before` is done each time before a folder is opened."""

    before: Callable[[str], Awaitable[None]] | None = None

    async def folder(self, path: str) -> LocalFolder:
        if self.before is not None:
            await self.before(path)
        return await super().folder(path)


class Bench:
    """A channel with three versions that share one file (0 to 2) and one of two ranks (3)."""

    def __init__(self, home: House) -> None:
        self.home, self.folder = home, home.base
        self.disk = Interrupted()
        self.channel = home.channel(disk=self.disk)
        self.book = self.channel.book("test")
        self.publisher = home.publisher(keep_last=9)

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
async def bench(home: House) -> Bench:
    found = Bench(home)
    await found.fill()
    return found


async def test_a_sound_channel_is_read_once(bench: Bench) -> None:
    """Nothing is found, every file was read, and no inode twice though three versions share it."""
    inodes = [(bench.folder / f"step_{n}" / SHARD).stat().st_ino for n in range(3)]
    assert len(set(inodes)) == 1, "the versions share the file"
    seen: list[tuple[int, int]] = []
    found = await verify(
        bench.channel, bench.book, progress=lambda done, total: seen.append((done, total))
    )
    assert found == []
    sizes = {
        path.stat().st_ino: path.stat().st_size
        for path in bench.folder.glob("step_*/*")
        if path.name not in ("STABLE", MANIFEST)
    }
    assert seen[-1] == (sum(sizes.values()),) * 2
    assert seen == sorted(seen)


async def test_a_flipped_bit_is_told_for_every_version_that_shares_it(bench: Bench) -> None:
    """Wherever it is: file and tensor are named, for all three versions and no other."""
    path = bench.folder / "step_1" / SHARD
    for at in (0, 10, path.stat().st_size // 2):
        flip(path, at)
        found = await bench.verify()
        assert [(one.version, one.problem, one.file) for one in found] == [
            (number, "bytes", SHARD) for number in range(3)
        ], f"byte {at}"
        flip(path, at)
    assert await bench.verify() == []
    flip(path, path.stat().st_size - 1)
    assert [one.detail for one in await bench.verify(0, 2)] == [
        f"step_0/{SHARD}: tensor beta differs",
        f"step_2/{SHARD}: tensor beta differs",
    ]


def _harm(bench: Bench, what: str) -> None:
    folder = bench.folder / "step_3"
    match what:
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
        case _:
            damage(folder, FIRST, what)


IN_SHARDS = {
    "a flipped bit": [("bytes", FIRST, "tensor one differs")],
    "a truncated shard": [("bytes", FIRST, "bytes instead of")],
    "an emptied shard": [("bytes", FIRST, "it has 0 bytes instead of")],
    "another tensor": [("bytes", FIRST, "tensor one is missing, tensor other is extra")],
    "swapped shards": [
        ("bytes", FIRST, "tensor one is missing, tensor two is extra"),
        ("bytes", SECOND, "tensor two is missing, tensor one is extra"),
    ],
    "no shard": [("missing", FIRST, "is missing, with the tensors one")],
    "a folder for a shard": [("bytes", FIRST, "cannot be read: Is a directory")],
    "a link for a shard": [("bytes", FIRST, "cannot be read")],
    "a pipe for a shard": [("bytes", FIRST, "cannot be read")],
}
DAMAGES = [
    *((what, IN_SHARDS[what]) for what in family.DAMAGES),
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
    _harm(bench, what)
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


async def test_damaged_versions_are_marked_when_that_is_asked_for(bench: Bench) -> None:
    """With the reason; what a mark means to consumers is told in `test_markers.py`."""
    flip(bench.folder / "step_3" / FIRST, 300)
    assert len(await bench.verify()) == 1
    assert (await bench.book.view()).marks == {}, "not asked to mark"
    await bench.verify(mark=True)
    ((number, reason),) = (await bench.book.view()).marks.items()
    assert (number, reason.partition(":")[0]) == (3, f"step_3/{FIRST}")


async def test_what_is_only_untidy_is_not_marked(bench: Bench) -> None:
    """Weights that can still be loaded are not taken from anybody."""
    _harm(bench, "no marker")
    (bench.folder / "step_2" / "extra").write_bytes(b"x")
    assert len(await bench.verify(mark=True)) == 2
    assert (await bench.book.view()).marks == {}


async def test_a_version_that_is_swept_meanwhile_is_not_missing(bench: Bench) -> None:
    """Between reading the book and opening the files everything old goes: nothing is found."""
    sweeping = bench.home.publisher(keep_last=1)
    opened: list[str] = []

    async def sweep(path: str) -> None:
        opened.append(path)
        if path.endswith("step_1") and opened.count(path) == 2:  # after it was listed
            bench.disk.before = None
            await sweeping.open()
            assert not (bench.folder / "step_1").exists()

    bench.disk.before = sweep
    assert await bench.verify() == []
    assert bench.disk.before is None, "the sweep did happen in the middle"


async def test_numbers(bench: Bench) -> None:
    """Only what was asked for is verified; a number that is not there is said so."""
    flip(bench.folder / "step_3" / FIRST, 300)
    assert await bench.verify(0, 1) == []
    assert [one.version for one in await bench.verify(1, 3)] == [3]
    with pytest.raises(NotFound, match="version 99 was not published"):
        await bench.verify(99)
    await bench.home.publisher(keep_last=1).open()
    with pytest.raises(Gone, match="version 1 was deleted"):
        await bench.verify(1)
