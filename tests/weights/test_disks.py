"""One suite for both disks: whatever holds for real files holds for simulated ones."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.errors import Mistake

from .benches import Bench, LocalBench, SimBench, tree


@pytest.fixture(params=["local", "sim"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = LocalBench(tmp_path) if request.param == "local" else SimBench()
    yield made
    made.close()


def on_bench(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in the event loop of its bench."""

    @functools.wraps(test)
    def run(bench: Bench, **given: Any) -> None:
        bench.run(test(bench, **given))

    return run


# ---- files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b""],
        [b"one", b"", b"two"],
        [memoryview(bytearray(range(200)))],
        [memoryview(bytearray(64)).cast("d"), b"tail"],
    ],
)
@on_bench
async def test_a_file_holds_what_was_written_and_its_hash_says_so(
    bench: Bench, chunks: list[bytes | memoryview]
) -> None:
    data = b"".join(chunks)
    async with await bench.disk.folder(bench.root) as folder:
        written = await folder.write("f", chunks)
        assert written.bytes == len(data)
        assert written.hash == xxhash.xxh3_128_hexdigest(data)
        file = await folder.open("f")
        assert bytes(file.view()) == data
        assert file.bytes == len(data)
        (item,) = await folder.items()
        assert (item.name, item.is_folder, item.bytes) == ("f", False, len(data))
        assert item.inode == file.inode
        file.close()
        assert await folder.read("f", len(data)) == data
        with pytest.raises(FileExistsError):
            await folder.write("f", [b"again"])
        assert await folder.read("f", len(data)) == data


@on_bench
async def test_a_view_may_be_written_to_and_the_file_does_not_change(bench: Bench) -> None:
    async with await bench.disk.folder(bench.root) as folder:
        await folder.write("f", [b"abc"])
        one, other = await folder.open("f"), await folder.open("f")
        one.view()[0] = ord("X")
        assert bytes(one.view()) == b"Xbc"
        assert bytes(other.view()) == b"abc"
        assert await folder.read("f", 10) == b"abc"
        one.close()
        other.close()


@on_bench
async def test_an_open_file_outlives_its_name_and_a_view_outlives_its_file(bench: Bench) -> None:
    async with await bench.disk.folder(bench.root) as folder:
        await folder.write("f", [b"still here"])
        file = await folder.open("f")
        await folder.unlink("f")
        await folder.write("f", [b"another"])
        view = file.view()
        assert bytes(view) == b"still here"
        file.close()
        file.close()
        assert bytes(view) == b"still here"
        with pytest.raises(ValueError, match="closed"):
            file.view()


@on_bench
async def test_a_write_that_fails_leaves_nothing(bench: Bench) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"begun"
        raise ZeroDivisionError("the caller's own trouble")

    async with await bench.disk.folder(bench.root) as folder:
        with pytest.raises(ZeroDivisionError):
            await folder.write("f", chunks())
        assert await folder.items() == []


@on_bench
async def test_a_cancelled_call_has_ended(bench: Bench) -> None:
    """It took effect wholly or not at all, and nothing of it happens afterwards."""

    async def cancelled(call: Coroutine[Any, Any, object], after: int) -> bool:
        task = asyncio.ensure_future(call)
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            return False
        return True

    many = 0
    for number in range(60):
        base = bench.path(f"d{number}")
        await bench.disk.make(f"{base}/old")
        async with await bench.disk.folder(base) as folder:
            many += await cancelled(folder.write("f", [b"whole"] * 3), number % 7)
            many += await cancelled(folder.put("g", b"whole"), number % 5)
            many += await cancelled(folder.open("g"), number % 3)
            many += await cancelled(bench.disk.rename(f"{base}/old", f"{base}/new"), number % 4)
            before = await tree(bench.disk, base)
            await asyncio.sleep(0.01)
            assert await tree(bench.disk, base) == before
        assert before.pop("f", b"whole" * 3) == b"whole" * 3
        assert before.pop("g", b"whole") == b"whole"
        assert set(before) in ({"old"}, {"new"})
    assert many > 60, "hardly any call was cancelled"


@on_bench
async def test_times_are_those_of_the_file_system(bench: Bench) -> None:
    """`touch` and `clock` tell the same clock, it never goes back, and links share a time."""
    async with await bench.disk.folder(bench.root) as folder:
        times = [await folder.clock()]
        times.append(await folder.touch("f"))
        (item,) = await folder.items()
        assert item.mtime_s == times[-1]
        assert item.bytes == 0
        times.append(await folder.clock())
        await folder.put("f", b"data")
        (item,) = await folder.items()
        times.append(item.mtime_s)
        times.append(await folder.touch("f"))
        assert await folder.read("f", 10) == b"data", "touching changes no bytes"
        file = await folder.open("f")
        assert await folder.link("g", file)
        file.close()
        one, other = await folder.items()
        assert one.mtime_s == other.mtime_s == times[-1]
        assert times == sorted(times)
        await bench.disk.make(bench.path("taken"))
        with pytest.raises(IsADirectoryError):
            await folder.touch("taken")


# ---- names ---------------------------------------------------------------------------


@on_bench
async def test_a_folder_is_itself_whatever_it_is_called(bench: Bench) -> None:
    """A writer that is late writes into its own folder, not into what has its name now."""
    disk = bench.disk
    await disk.make(bench.path("a"))
    async with await disk.folder(bench.path("a")) as late:
        await disk.rename(bench.path("a"), bench.path("b"))
        await disk.make(bench.path("a"))
        await late.write("f", [b"late"])
        await late.put("g", b"late")
        await late.touch("h")
        assert await tree(disk, bench.root) == {
            "a": None,
            "b": None,
            "b/f": b"late",
            "b/g": b"late",
            "b/h": b"",
        }


@on_bench
async def test_in_a_deleted_folder_nothing_is_there_and_nothing_can_be_made(bench: Bench) -> None:
    disk = bench.disk
    await disk.make(bench.path("a"))
    async with await disk.folder(bench.root) as root:
        await root.write("f", [b"data"])
        file = await root.open("f")
    async with await disk.folder(bench.path("a")) as folder:
        await folder.write("f", [b"data"])
        await disk.remove(bench.path("a"))
        await disk.make(bench.path("a"))
        assert await folder.items() == []
        makers: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: folder.write("f", [b""]),
            lambda: folder.put("f", b""),
            lambda: folder.touch("f"),
            lambda: folder.clock(),
            lambda: folder.open("f"),
            lambda: folder.read("f", 1),
            lambda: folder.link("f", file),
        ]
        for make in makers:
            with pytest.raises(FileNotFoundError):
                await make()
        await folder.unlink("f")
        await folder.sync()
    file.close()
    assert await tree(disk, bench.root) == {"a": None, "f": b"data"}


@on_bench
async def test_a_link_is_another_name_of_the_same_file(bench: Bench) -> None:
    async with await bench.disk.folder(bench.root) as folder:
        await folder.write("f", [b"data"])
        file = await folder.open("f")
        assert await folder.link("g", file)
        one, other = await folder.items()
        assert one.inode == other.inode == file.inode
        with pytest.raises(FileExistsError):
            await folder.link("g", file)
        await folder.unlink("f")
        assert await folder.link("h", file), "another name is left"
        await folder.unlink("g")
        await folder.unlink("h")
        with pytest.raises(FileNotFoundError):
            await folder.link("f", file)
        file.close()


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("file", "fresh", None),
        ("file", "other", None),
        ("file", "same", None),
        ("file", "empty", IsADirectoryError),
        ("file", "full", IsADirectoryError),
        ("file", "file", None),
        ("empty", "fresh", None),
        ("empty", "hollow", None),
        ("empty", "full", FileExistsError),
        ("empty", "file", NotADirectoryError),
        ("full", "hollow", None),
        ("full", "empty/full", None),
        ("full", "full/deep/full", OSError),
        ("full/deep", "full", FileExistsError),
        ("full/deep/f", "full", FileExistsError),
        ("absent", "fresh", FileNotFoundError),
        ("file", "absent/fresh", FileNotFoundError),
        ("file/x", "fresh", NotADirectoryError),
        ("empty", "file/x", NotADirectoryError),
    ],
)
@on_bench
async def test_renaming(bench: Bench, old: str, new: str, outcome: type[OSError] | None) -> None:
    """A file replaces a file, a folder only an empty folder; everything else changes nothing."""
    disk = bench.disk
    for path in ("empty", "hollow", "full/deep"):
        await disk.make(bench.path(path))
    async with await disk.folder(bench.root) as folder:
        await folder.write("file", [b"file"])
        await folder.write("other", [b"other"])
        file = await folder.open("file")
        await folder.link("same", file)
        file.close()
    async with await disk.folder(bench.path("full/deep")) as folder:
        await folder.write("f", [b"deep"])
    before = await tree(disk, bench.root)
    if outcome is not None:
        with pytest.raises(outcome):
            await disk.rename(bench.path(old), bench.path(new))
        assert await tree(disk, bench.root) == before
        return
    await disk.rename(bench.path(old), bench.path(new))
    after = await tree(disk, bench.root)
    assert after[new] == before[old]
    # Two names of one file stay two: that is what rename(2) does.
    assert (old in after) == (old == new or new == "same")
    for path, data in before.items():
        if path.startswith(f"{old}/"):
            assert after[new + path.removeprefix(old)] == data


@on_bench
async def test_removing_atree(bench: Bench) -> None:
    disk = bench.disk
    await disk.make(bench.path("a/b/c"))
    await disk.make(bench.path("a/d"))
    for path in ("a", "a/b", "a/b/c"):
        async with await disk.folder(bench.path(path)) as folder:
            await folder.write("f", [b"x"])
    assert not await disk.remove_empty(bench.path("a"))
    assert await disk.remove_empty(bench.path("a/d"))
    assert await disk.remove_empty(bench.path("a/d")), "it is gone"
    with pytest.raises(NotADirectoryError):
        await disk.remove_empty(bench.path("a/f"))
    await disk.remove(bench.path("a/f"))
    await disk.remove(bench.path("a"))
    await disk.remove(bench.path("a"))
    await disk.remove(bench.path("a/b"))
    assert await tree(disk, bench.root) == {}


@on_bench
async def test_two_may_remove_the_same_tree_while_others_write_into_it(bench: Bench) -> None:
    disk = bench.disk

    async def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            for number in range(20):
                await late.touch(f"late{number}")

    await disk.make(bench.path("a/b"))
    late = await disk.folder(bench.path("a/b"))
    async with await disk.folder(bench.path("a")) as folder:
        for number in range(30):
            await folder.touch(f"f{number}")
    await asyncio.gather(disk.remove(bench.path("a")), write(), disk.remove(bench.path("a")))
    late.close()
    assert await tree(disk, bench.root) == {}


@on_bench
async def test_making_folders(bench: Bench) -> None:
    disk = bench.disk
    await disk.make(bench.path("a/b"))
    await disk.make(bench.path("a/b"))
    async with await disk.folder(bench.path("a")) as folder:
        await folder.write("f", [b""])
    with pytest.raises(FileExistsError):
        await disk.make(bench.path("a/f"))
    with pytest.raises(NotADirectoryError):
        await disk.make(bench.path("a/f/g"))
    with pytest.raises(NotADirectoryError):
        await disk.folder(bench.path("a/f"))
    with pytest.raises(FileNotFoundError):
        await disk.folder(bench.path("a/g"))
    async with await disk.folder(bench.path("a")) as folder:
        with pytest.raises(IsADirectoryError):
            await folder.open("b")
        with pytest.raises(IsADirectoryError):
            await folder.unlink("b")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b"])
@on_bench
async def test_a_name_leads_nowhere_else(bench: Bench, name: str) -> None:
    async with await bench.disk.folder(bench.root) as folder:
        for call in (
            folder.write(name, [b""]),
            folder.put(name, b""),
            folder.touch(name),
            folder.open(name),
            folder.read(name, 1),
            folder.unlink(name),
        ):
            with pytest.raises(Mistake):
                await call


@on_bench
async def test_a_closed_folder_says_so(bench: Bench) -> None:
    folder = await bench.disk.folder(bench.root)
    folder.close()
    folder.close()
    for call in (folder.items(), folder.touch("f"), folder.clock(), folder.sync()):
        with pytest.raises(ValueError, match="closed"):
            await call


# ---- work ----------------------------------------------------------------------------


@on_bench
async def test_work_is_done_in_order_and_its_errors_come_out(bench: Bench) -> None:
    def fail() -> int:
        raise ZeroDivisionError

    done: list[int] = []

    def note() -> int:
        done.append(1)
        return 1

    assert await bench.disk.work(max, 1, 2) == 2
    assert await bench.disk.gather([functools.partial(pow, n, 2) for n in range(20)]) == [
        n * n for n in range(20)
    ]
    assert await bench.disk.gather([]) == []
    with pytest.raises(ZeroDivisionError):
        await bench.disk.work(fail)
    with pytest.raises(ZeroDivisionError):
        await bench.disk.gather([fail, note])
    assert done == [1], "all of them have ended"
