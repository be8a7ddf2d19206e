"""Publishing by real processes that are killed, stopped, replaced and failed by their disk.

Invariants: whoever reads (a subscriber, or a program that knows only `step_N` and `STABLE`)
sees whole versions or none; a number that was committed never means anything else; the next
publisher cleans up and goes on; a publisher that was replaced changes nothing any more.
"""

import contextlib
import random
import re
import signal
from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.weights import Publisher, Version
from holdfast.weights.manifest import MARKER
from patience import HANG_S
from weights.children import publish
from weights.family import House, Kid, go, house, need_strace, points

PUBLISH = points("weights.publish.")
COMMITTED = "weights.publish.committed"


def _seed() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


# ---- killed ------------------------------------------------------------------------


async def _goes_on(home: House, next_one: Publisher, again: int, committed: bool) -> None:
    """Publish 7 again, after its first publisher (flavour 0) died; then 8."""
    assert home.leftovers() == []
    earlier = home.folders() != [7] * committed
    assert await next_one.next_version() == (8 if committed else 7 if earlier else 0)
    assert (7 in home.folders()) == committed
    if committed:
        first = home.bytes_of(7)
        assert (await publish(next_one, 7, 0)).version == 7
        with pytest.raises(Mistake, match="other contents"):
            await publish(next_one, 7, 1)
        assert home.bytes_of(7) == first
    else:
        await publish(next_one, 7, again, "ranks")
        with pytest.raises(Mistake, match="other contents"):
            await publish(next_one, 7, 1 - again)
    assert await home.read(7) == (7, 0 if committed else again)
    await publish(next_one, 8)
    with pytest.raises(Mistake):
        await publish(next_one, 7, 2)


@pytest.mark.parametrize("point", PUBLISH)
@pytest.mark.parametrize(
    ("earlier", "again"),
    [
        pytest.param(False, 0, id="first-same"),
        pytest.param(True, 1, id="later-other"),
        pytest.param(False, 1, id="first-other", marks=pytest.mark.long),
        pytest.param(True, 0, id="later-same", marks=pytest.mark.long),
    ],
)
async def test_killed_publisher(home: House, point: str, earlier: bool, again: int) -> None:
    """kill -9 at every point: no reader sees half a version, and the next publisher goes on.

    The number is published again with the same contents, or with others if it was never
    committed; a committed one keeps its contents for ever. Nothing is left lying around.
    """
    luck = _seed()
    hit = luck.choice((1, 2)) if point == "weights.publish.shard" else 1
    if earlier:
        async with home.publisher() as first:
            await publish(first, 5, 0, "ranks")
            await publish(first, 6, 0, "ranks")
    with (
        home.start("readers") as readers,
        home.start("publisher", fault=f"{point}:kill@{hit}", versions=[(7, 0)]) as victim,
    ):
        await go(victim)
        await readers.ahear("ready")
        assert await victim.killed() == point
        committed = point == COMMITTED
        assert await home.committed() == [5, 6] * earlier + [7] * committed
        async with home.publisher() as next_one:
            await _goes_on(home, next_one, again, committed)
            readers.tell(8)
            report = await readers.ahear("report")
            await next_one.sweep()
        assert report["problems"] == []
        assert report["reads"] > 0
        assert await home.committed() == home.folders() == [7, 8]
        assert await home.read_all() == [(7, 0 if committed else again), (8, 0)]
        assert home.leftovers() == []


@pytest.mark.long
async def test_killed_again_and_again(home: House) -> None:
    """Publishers that die one after the other, each at another point, leave one clean channel."""
    luck = _seed()
    order = luck.sample(PUBLISH, len(PUBLISH))[:5]
    print(f"order {order}")
    for point in order:
        versions = [(number, 0) for number in range(20)]
        kill = f"{point}:kill"
        with home.start("publisher", fault=kill, versions=versions, way="whole") as victim:
            await go(victim)
            assert await victim.killed() == point
    async with home.publisher() as last:
        assert home.leftovers() == []
        assert home.folders() == await home.committed()
        number = await last.next_version()
        assert number == order.count(COMMITTED)
        await publish(last, number, 1)
        assert await home.read() == (number, 1)


# ---- stopped, and replaced meanwhile -----------------------------------------------


async def _outcome(kid: Kid) -> str:
    found: str = (await kid.ahear("outcome"))["error"]
    return found


@pytest.mark.parametrize("point", PUBLISH)
async def test_stopped_and_replaced(home: House, point: str) -> None:
    """A publisher that sleeps while another takes over wakes up fenced, and does no harm.

    The number it was publishing is published by the successor with other contents. Those
    stay as they are, byte for byte. The old one is told `Fenced`, now and ever after.
    """
    async with home.publisher() as first:
        await publish(first, 6, 0, "ranks")
    versions = [(7, 0), (8, 0), (9, 0)]
    with home.start("publisher", fault=f"{point}:stop", versions=versions) as old:
        await go(old)
        assert await old.stopped() == point
        async with home.publisher() as new:
            flavour = 1
            if point == COMMITTED:  # then it is too late for other contents
                flavour = 0
                with pytest.raises(Mistake, match="other contents"):
                    await publish(new, 7, 1)
            else:
                await publish(new, 7, 1, "ranks")
            right = home.bytes_of(7)
            old.child.signal(signal.SIGCONT)
            assert await _outcome(old) == ("" if point == COMMITTED else "Fenced")
            assert [await _outcome(old), await _outcome(old)] == ["Fenced", "Fenced"]
            await old.ahear("done")
            assert home.bytes_of(7) == right
            await publish(new, 8, 1)  # the old one has not taken anything back
            assert await home.read_all() == [(7, flavour), (8, 1)]
            await new.sweep()
        assert home.folders() == [7, 8]
        assert home.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", PUBLISH)
async def test_both_stopped(tmp_path: Path, point: str) -> None:
    """The successor too sleeps, at every point, while the old publisher wakes up and goes on."""
    for second in PUBLISH:
        folder = tmp_path / second
        folder.mkdir()
        async with house(folder) as home:
            with home.start("publisher", fault=f"{point}:stop", versions=[(7, 0)]) as old:
                await go(old)
                await old.stopped()
                known = point == COMMITTED
                versions = [(8, 1)] if known else [(7, 1)]
                with home.start("publisher", fault=f"{second}:stop", versions=versions) as new:
                    await go(new)
                    await new.stopped()
                    old.child.signal(signal.SIGCONT)
                    assert await _outcome(old) == ("" if known else "Fenced"), second
                    new.child.signal(signal.SIGCONT)
                    assert await _outcome(new) == "", second
            assert await home.read() == (8 if known else 7, 1)
            async with home.publisher():
                assert home.leftovers() == []
                assert home.folders() == await home.committed()


async def test_an_emptied_folder_is_no_obstacle(home: House) -> None:
    """What is left when somebody dies while clearing a folder away is cleared away too."""
    async with home.publisher() as first:
        await publish(first, 6)
        for number in (5, 7, 8):
            (home.base / f"step_{number}").mkdir()
        await publish(first, 7)
    async with home.publisher():
        assert home.folders() == [6, 7]
    assert await home.read_all() == [(6, 0), (7, 0)]


async def test_somebody_elses_folder_is_not_touched(home: House) -> None:
    """A folder that holds other people's files is left alone, and publishing says so."""
    async with home.publisher() as publisher:
        (home.base / "step_3").mkdir()
        (home.base / "step_3" / "model.safetensors").write_bytes(b"precious")
        with pytest.raises(Mistake, match="in the way"):
            await publish(publisher, 3)
        assert home.bytes_of(3) == {"model.safetensors": b"precious"}
        assert home.leftovers() == []
        await publish(publisher, 4)
        assert home.bytes_of(3) == {"model.safetensors": b"precious"}


async def test_begun_and_never_finished(home: House) -> None:
    """A draft that was given up goes when its number can no longer be published."""
    async with home.publisher() as publisher:
        ticket = await publisher.begin(1)
        other = await publisher.begin(1)
        later = await publisher.begin(3)
        await publisher.sweep()
        assert len(home.leftovers()) == 3
        await publish(publisher, 1, 0, "ranks")
        assert home.leftovers() == [f".holdfast/drafts/{Path(later.path).name}"]
        for late in (ticket, other):
            with pytest.raises(Mistake, match="begin it again"):
                await publisher.finish(late, 3)
        await publish(publisher, 3)
        assert home.leftovers() == []


# ---- the order, as the kernel saw it -----------------------------------------------


class Call:
    """One system call: its name, what it was called with, and when it began and ended."""

    def __init__(self, name: str, args: str, began: int) -> None:
        self.name, self.args, self.began, self.ended = name, args, began, began
        self.failed = False

    def __repr__(self) -> str:
        return f"{self.began}-{self.ended} {self.name}({self.args[:200]}"


_LINE = re.compile(r"(\d+) +(?:(\w+)\((.*)|<\.\.\. (\w+) resumed>(.*))")


def _calls(text: str) -> list[Call]:
    """What strace wrote, with the halves of interrupted lines put together."""
    found: list[Call] = []
    pending: dict[str, Call] = {}
    for at, line in enumerate(text.splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue  # a signal, or the end of a thread
        pid, name, args, _, rest = match.groups()
        if name:
            found.append(Call(name, args, at))
            if args.endswith("<unfinished ...>"):
                pending[pid] = found[-1]
            else:
                found[-1].failed = " = -1 " in args[-80:]
        else:
            call = pending.pop(pid)
            call.ended, call.args = at, call.args + rest
            call.failed = " = -1 " in rest[-80:]
    return [call for call in found if not call.failed]


class Order:
    """Finds calls, and proves that one group ended before another began."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.last = -1
        self.story: list[str] = []

    def find(self, name: str, pattern: str) -> list[Call]:
        return [
            call
            for call in self.calls
            if re.fullmatch(name, call.name) and re.search(pattern, call.args)
        ]

    def then(self, what: str, name: str, pattern: str) -> Call:
        """Exactly one such call, and it began after everything before had ended."""
        (call,) = self.find(name, pattern)
        assert call.began > self.last, f"{what} too early: {call!r} after {self.story}"
        self.last = call.ended
        self.story.append(what)
        return call


TRACED = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat"
TRACED += ",unlink,unlinkat,mkdir,mkdirat"


@pytest.mark.parametrize("way", ["whole", "ranks"])
async def test_the_order_of_publishing(home: House, way: str) -> None:
    """As strace sees it: files and draft synced, renamed, parent synced, marked, recorded.

    Each step ends before the next begins, so wherever power fails, what a reader can find
    is whole. Files that are shared with the parent are links to files synced long ago.
    """
    _check_order(await _trace(home, way), str(home.base), way)


def _check_order(calls: list[Call], base: str, way: str) -> None:
    order = Order(calls)
    draft = rf"<{base}/\.holdfast/drafts/e2-7-[0-9a-f]+"
    shards = ["model"] if way == "whole" else [f"model-rank{n:05d}-00001" for n in range(3)]
    written = [f"{name}.safetensors" for name in shards]
    if way == "ranks":  # the first rank's file is the same as before
        shared = written.pop(0)
        (link,) = order.find("linkat", rf"{draft}>, \"{shared}\"")
        order.last = link.ended
        written += ["model.safetensors.index.json"]
    ended = [order.last]
    for name in [*written, "config.json", "holdfast.json", MARKER]:
        (sync,) = order.find("fsync", rf"{draft}/{re.escape(name)}>")
        wrote = order.find("write|pwrite64", rf"{draft}/{re.escape(name)}>")
        assert wrote, name
        assert max(call.ended for call in wrote) < sync.began, name
        ended.append(sync.ended)
    order.last = max(ended)
    syncs = [call for call in order.find("fsync", rf"{draft}>") if call.began > order.last]
    assert syncs, "the draft folder was not synced after its last file"
    order.last = syncs[-1].ended
    order.then("rename", r"rename(at2?)?", rf"/drafts/e2-7-[^\"]*\".*\"{base}/step_7\"")
    parent = [call for call in order.find("fsync", rf"<{base}>") if call.began > order.last]
    assert parent, "the channel's folder was not synced after the rename"
    order.last = parent[0].ended
    marked = rf"<{base}/step_7>, \"{re.escape(MARKER)}\", .*<{base}/step_7>, \"STABLE\""
    order.then("marker", r"renameat2?", marked)
    order.then("folder synced", "fsync", rf"<{base}/step_7>")
    records = order.find("write|pwrite64", r"ledger\.db-wal>.*live/versions/000000000007")
    assert records, "no write of the version's record was seen"
    assert records[0].began > order.last, f"recorded too early: {records[0]!r}"


# ---- a disk that fails ---------------------------------------------------------------


async def _trace(home: House, way: str) -> list[Call]:
    """Publish 7 after 6 in a child, and give its system calls."""
    trace = home.folder / "trace"
    under = [need_strace(), "-f", "-y", "-s", "1000000", "-e", f"trace={TRACED}", "-o", str(trace)]
    async with home.publisher() as first:
        await publish(first, 6, 0, way)
    with home.start("publisher", under=under, versions=[(7, 0)], way=way) as child:
        await go(child)
        assert await _outcome(child) == ""
        await child.ahear("done")
        assert child.child.wait(HANG_S) == 0
    return _calls(trace.read_text())


async def _fails(home: House, inject: list[str], way: str = "ranks") -> int:
    """Publish 7 again and again while fsync fails now and then; returns how often it failed.

    Each try has other contents, which could not be published if anything of an earlier one
    had been recorded.
    """
    async with home.publisher() as first:
        await publish(first, 6, 0, "ranks")
    tries = [(7, flavour) for flavour in range(9)]
    under = [need_strace(), "-f", "-o", "/dev/null", "-e", "trace=fsync", *inject]
    with home.start("publisher", under=under, versions=tries, way=way) as child:
        opened = await child.ahear("ready")
        if opened["error"]:
            assert opened["error"] == "Unavailable"
            assert "Input/output error" in opened["text"]
            assert await home.read_all() == [(6, 0)]
            return 1
        child.tell("go")
        outcomes = [await child.ahear("outcome") for _ in tries]
        await child.ahear("done")
    first_good = [one["error"] for one in outcomes].index("")
    for one in outcomes[:first_good]:
        assert one["error"] == "Unavailable", one
        assert "version 7 was not published: Input/output error" in one["text"]
    assert {one["error"] for one in outcomes[first_good + 1 :]} == {"Mistake"}
    assert await home.read_all() == [(6, 0), (7, first_good)]
    assert home.leftovers() == []
    return first_good


@pytest.mark.parametrize("what", ["", "step_7"], ids=["base", "folder"])
async def test_failing_fsync(tmp_path: Path, what: str) -> None:
    """EIO from fsync: a clean error, nothing of it is ever seen, and a later try works."""
    # It is counted per thread, and the channel's folder is synced when it is opened, too: by luck
    # two threads do it, and none comes to its second. Then it is tried again.
    when = "2" if what == "" else "1"
    for attempt in range(5):
        (tmp_path / str(attempt)).mkdir()
        async with house(tmp_path / str(attempt)) as home:
            path = str(home.base / what)
            inject = ["-P", path, "-e", f"inject=fsync:error=EIO:when={when}"]
            if await _fails(home, inject) > 0:
                return
    raise AssertionError("no fsync was made to fail")


@pytest.mark.timeout(120)
async def test_failing_fsync_of_any_file(tmp_path: Path) -> None:
    """The same for whatever a thread syncs as its n-th file: shards, manifest, draft, ledger."""
    failed = 0
    for when in (2, 4):
        folder = tmp_path / str(when)
        folder.mkdir()
        async with house(folder) as home:
            failed += await _fails(home, ["-e", f"inject=fsync:error=EIO:when={when}"], "whole")
    assert failed >= 2


async def test_trouble_after_the_commit_is_no_failure(home: House) -> None:
    """Once a version exists, a sweep that fails does not make `publish` say otherwise."""
    fault = "weights.sweep.decided:raise=OSError(EIO)@1"
    versions = [(1, 0), (2, 0), (3, 0)]
    with home.start(
        "publisher", fault=fault, versions=versions, way="whole", keep_last=1
    ) as child:
        await go(child)
        outcomes = [await child.ahear("outcome") for _ in range(3)]
        assert [one["error"] for one in outcomes] == ["", "", ""], outcomes
        assert child.fired() == "weights.sweep.decided"
    assert await home.committed() == home.folders() == [3]


async def test_a_damaged_leftover_does_not_keep_us_from_opening(home: House) -> None:
    """A folder beyond the newest version whose manifest cannot be read is not ours to judge."""
    async with home.publisher() as first:
        await publish(first, 1)
    (home.base / "step_2").mkdir()
    (home.base / "step_2" / "holdfast.json").write_bytes(b"{}")
    async with home.publisher() as second:
        with contextlib.suppress(Mistake):
            await publish(second, 2)
        assert isinstance(await publish(second, 3), Version)
    assert await home.read() == (3, 0)
