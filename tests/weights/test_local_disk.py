"""Real files only: symbolic links, pipes, threads, descriptors, and a disk that refuses."""

import asyncio
import os
import resource
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from descriptors import held_below
from holdfast.weights import local
from holdfast.weights.local import LocalDisk
from patience import HANG_S


async def test_symbolic_links_in_a_folder_are_never_followed(tmp_path: Path) -> None:
    """Not by opening, reading, touching, writing or removing; a link is a name like others."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file").symlink_to(outside / "precious")
    (inside / "folder").symlink_to(outside)
    (inside / "dangling").symlink_to(outside / "new")
    disk = LocalDisk()
    async with await disk.folder(str(inside)) as folder:
        assert {item.name: item.is_folder for item in await folder.items()} == {
            "file": False,
            "folder": False,
            "dangling": False,
        }
        for name in ("file", "folder", "dangling"):
            with pytest.raises(OSError, match="symbolic links"):
                await folder.open(name)
            with pytest.raises(OSError, match="symbolic links"):
                await folder.read(name, 100)
            with pytest.raises(OSError, match="symbolic links"):
                await folder.touch(name)
            with pytest.raises(FileExistsError):
                await folder.write(name, [b"x"])
        await folder.put("dangling", b"replaces the link itself")
    assert not (inside / "dangling").is_symlink()
    await disk.remove(str(inside))
    assert not inside.exists()
    (tmp_path / "alias").symlink_to(outside)
    await disk.remove(str(tmp_path / "alias"))
    assert not (tmp_path / "alias").is_symlink()
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {
        "precious": b"precious"
    }


async def test_a_path_may_lead_through_symbolic_links(tmp_path: Path) -> None:
    """Where the weights are kept is the user's choice."""
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    async with await LocalDisk().folder(str(tmp_path / "alias")) as folder:
        await folder.write("f", [b"x"])
    assert (tmp_path / "real" / "f").read_bytes() == b"x"


async def test_a_pipe_is_not_a_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(HANG_S), await LocalDisk().folder(str(tmp_path)) as folder:
        for call in (folder.open("pipe"), folder.read("pipe", 1), folder.touch("pipe")):
            with pytest.raises(OSError):
                await call


async def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path: Path) -> None:
    """A real failure after some bytes: a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with await LocalDisk().folder(str(tmp_path)) as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                await folder.write("f", [bytes(1 << 19)] * 4)
            with pytest.raises(OSError, match="too large"):
                await folder.put("g", bytes(1 << 21))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await folder.items() == []


async def test_large_chunks_are_written_in_pieces_and_whole(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 40
    async with await LocalDisk().folder(str(tmp_path)) as folder:
        written = await folder.write("f", [memoryview(data)])
        assert written.bytes == len(data)
        file = await folder.open("f")
        assert file.view() == data
        file.close()


async def test_the_loop_runs_and_short_calls_go_on_while_all_cores_work(tmp_path: Path) -> None:
    """A heartbeat does not wait behind writes: all threads for work are taken, and held."""
    disk = LocalDisk()
    release = threading.Event()
    threads = len(os.sched_getaffinity(0)) + 1

    def chunks() -> Iterator[bytes]:
        release.wait(HANG_S)
        yield b"late"

    async with asyncio.timeout(HANG_S), await disk.folder(str(tmp_path)) as folder:
        writes = [asyncio.ensure_future(folder.write(f"f{n}", chunks())) for n in range(threads)]
        works = asyncio.ensure_future(disk.gather([lambda: release.wait(HANG_S)] * threads))
        for _ in range(5):
            await folder.touch("heartbeat")
        assert not any(task.done() for task in [*writes, works])
        release.set()
        await asyncio.gather(*writes, works)
        assert len(await folder.items()) == threads + 1


async def test_a_cancelled_write_stops_between_pieces_and_leaves_nothing(tmp_path: Path) -> None:
    """It does not go on to the end of a version that nobody wants any more."""
    begun, release = threading.Event(), threading.Event()
    asked: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(1000):
            asked.append(number)
            begun.set()
            release.wait(HANG_S)
            yield b"x"

    async with asyncio.timeout(HANG_S), await LocalDisk().folder(str(tmp_path)) as folder:
        write = asyncio.ensure_future(folder.write("f", chunks()))
        await asyncio.to_thread(begun.wait, HANG_S)
        write.cancel()
        await asyncio.sleep(0)
        write.cancel()  # being impatient does not help
        await asyncio.sleep(0)
        assert not write.done(), "it has not ended yet"
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await write
        assert await folder.items() == []
    assert asked == [0]


async def test_a_call_that_waits_for_a_thread_is_cancelled_without_effect(tmp_path: Path) -> None:
    disk = LocalDisk()
    release = threading.Event()
    threads = len(os.sched_getaffinity(0))
    async with asyncio.timeout(HANG_S), await disk.folder(str(tmp_path)) as folder:
        works = asyncio.ensure_future(disk.gather([lambda: release.wait(HANG_S)] * threads))
        await asyncio.sleep(0)
        write = asyncio.ensure_future(folder.write("f", [b"x"]))
        await asyncio.sleep(0)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        assert not works.done()
        release.set()
        await works
        assert await folder.items() == []


async def test_closing_a_folder_waits_for_its_calls(tmp_path: Path) -> None:
    """A call still reaches its folder: here a failed write takes its file back."""
    release, begun = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        begun.set()
        release.wait(HANG_S)
        yield b"data"
        raise ZeroDivisionError

    async with asyncio.timeout(HANG_S):
        folder = await LocalDisk().folder(str(tmp_path))
        write = asyncio.ensure_future(folder.write("f", chunks()))
        await asyncio.to_thread(begun.wait, HANG_S)
        assert (tmp_path / "f").exists()
        folder.close()
        release.set()
        with pytest.raises(ZeroDivisionError):
            await write
    assert not (tmp_path / "f").exists()
    assert held_below(tmp_path) == []


async def test_what_is_certain_is_synced_in_the_right_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content before its name is given, the folder after; seen at the system calls."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")

    def noted_rename(*args: Any, **kwargs: Any) -> None:
        rename(*args, **kwargs)
        calls.append("rename")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    async with await LocalDisk().folder(str(tmp_path)) as folder:
        await folder.write("f", [b"12", b"345"])
        assert calls == ["5 bytes"]
        calls.clear()
        await folder.put("g", b"123")
        assert calls == ["3 bytes", "rename", "folder"]
        calls.clear()
        await folder.sync()
        assert calls == ["folder"]


def test_removing_a_tree_that_is_filled_for_ever_ends(tmp_path: Path) -> None:
    """What is put into it meanwhile is removed too, but not endlessly."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").touch()

    class Endless(local.Stop):
        """Somebody else, who is quick."""

        def check(self) -> None:
            (tree / f"late{os.urandom(8).hex()}").touch()

    with pytest.raises(OSError, match="not empty"):
        local._remove(str(tree), None, 0, Endless())


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    """Not by failures, not by cancelled calls whose result nobody got."""
    disk = LocalDisk()
    async with await disk.folder(str(tmp_path)) as folder:
        await folder.write("f", [b"data"])
        before = held_below(tmp_path)
        for turn in range(50):
            calls = [
                asyncio.ensure_future(folder.open("f")),
                asyncio.ensure_future(disk.folder(str(tmp_path))),
                asyncio.ensure_future(folder.items()),
                asyncio.ensure_future(folder.open("missing")),
            ]
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, asyncio.CancelledError | FileNotFoundError)
        assert held_below(tmp_path) == before
    assert (len(before), held_below(tmp_path)) == (1, [])


async def test_two_listings_at_once_are_both_complete(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"f{number:03}").touch()
    async with await LocalDisk().folder(str(tmp_path)) as folder:
        for items in await asyncio.gather(*(folder.items() for _ in range(8))):
            assert len(items) == 500


async def test_no_link_to_another_file_system(tmp_path: Path) -> None:
    """Then the answer is no, and whoever asked copies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == tmp_path.stat().st_dev:
            # A user may have everything on one file system; CI must really try this.
            (pytest.fail if os.environ.get("CI") else pytest.skip)("only one file system here")
        disk = LocalDisk()
        async with await disk.folder(other) as there, await disk.folder(str(tmp_path)) as here:
            await there.write("f", [b"data"])
            file = await there.open("f")
            assert not await here.link("f", file)
            assert await there.link("g", file)
            file.close()


async def test_the_clock_without_nameless_files_tells_the_same_time(tmp_path: Path) -> None:
    """Where the file system has no files without names, a named one serves, and is deleted."""
    async with await LocalDisk().folder(str(tmp_path)) as folder:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        before = await folder.clock()
        named = local._named_clock(descriptor)
        after = await folder.touch("f")
        os.close(descriptor)
        assert before <= named <= after
        assert [item.name for item in await folder.items()] == ["f"]


async def test_files_are_readable_for_others(tmp_path: Path) -> None:
    """Consumers may run as another user: files are made with mode 644, less the umask."""
    umask = os.umask(0o022)
    try:
        async with await LocalDisk().folder(str(tmp_path)) as folder:
            await folder.write("f", [b""])
            await folder.put("g", b"")
            await folder.touch("h")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
