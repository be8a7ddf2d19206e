"""`holdfast weights`: what people see and do, through the real command."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import ledger, proc
from holdfast.text import parse_bytes
from holdfast.weights import Publisher, Retention, Subscriber
from kids import Kid
from patience import HANG_S
from weights.command import rows, run
from weights.family import foreign, start

HOLDFAST = [sys.executable, "-m", "holdfast"]
SHARD = "model.safetensors"
KEEP = Retention(keep_last=9, max_bytes=10 << 20)


def _run(command: str, *args: str, code: int = 0) -> str:
    return run("weights", command, *args, code=code)


def _rows(command: str, *args: str, code: int = 0, only: str = "") -> list[dict[str, Any]]:
    return rows("weights", command, *args, code=code, only=only)


def _only(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["type"] == kind]


def _folders(path: str | Path) -> list[str]:
    return sorted(one.name for one in Path(path).glob("step_*"))


class Place:
    """A channel on sqlite: versions 0 to 3 have the same shard and different configurations."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"sqlite:///{root}/ledger.db"
        self.path = str(root / "policy")

    def publish(self, *numbers: int, retention: Retention | None = KEEP) -> None:
        async def work() -> None:
            async with (
                ledger.open(self.url) as led,
                Publisher(self.root, led, "policy", retention) as publisher,
            ):
                for number in numbers:
                    tensors = {"alpha": np.arange(2000.0), "beta": np.ones((3, 4), np.float32)}
                    config = f'{{"step": {number}}}'.encode()
                    await publisher.publish(number, tensors, files={"config.json": config})

        asyncio.run(work())

    @contextlib.contextmanager
    def consumer(self, name: str, number: int, lease_s: float = 30) -> Iterator[Kid]:
        """A live consumer that serves, pins and has staged a version."""
        where = {"root": str(self.root), "url": self.url}
        how: dict[str, Any] = {"needs": "every", "lease_s": lease_s, "number": number}
        with start("consumer", folder=self.root, name=name, **where, **how) as kid:
            kid.hear("ready")
            kid.tell("go")
            kid.tell("serve")
            assert kid.hear("outcome")["error"] == ""
            yield kid


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    found.publish(0, 1, 2, 3)
    return found


# ---- ls ----------------------------------------------------------------------------


def test_ls_with_two_live_consumers_and_a_dead_one(place: Place) -> None:
    """The dead one is seen to be silent while its lease runs out; then only its staging
    folder is left, as something to be swept."""
    with (
        place.consumer("r0", 3) as alive,
        place.consumer("r1", 3),
        place.consumer("r2", 1, lease_s=6) as dead,
    ):
        rows = _rows("ls", place.path)
        assert [one["consumer"] for one in _only(rows, "consumer")] == ["r0", "r1", "r2"]
        assert not _only(rows, "leftover"), "what the living have staged is not left over"
        dead.child.kill_group()

        lines: dict[str, str] = {}

        def look() -> dict[str, str]:
            nonlocal lines
            text = _run("ls", place.path)
            lines = {line[:2]: line for line in text.splitlines() if line.startswith("r")}
            assert [lines[name].split()[1] for name in ("r0", "r1")] == ["alive", "alive"]
            return lines

        alive.child.wait_until(lambda: "silent for " in look()["r2"], HANG_S)
        assert " ends in " in lines["r2"]
        alive.child.wait_until(lambda: "r2" not in look(), HANG_S)
        rows = _rows("ls", place.path)
        (left,) = _only(rows, "leftover")
        assert left["path"].startswith(".holdfast/staging/r2-")
        assert "r2, which is gone" in left["why"]
        text = _run("ls", place.path)
        assert "r2, which is gone" in text
        assert f"holdfast weights sweep {place.path}" in text


def test_ls_tells_who_pins_serves_and_shares(place: Place) -> None:
    """Sizes count shared files once; what a version adds is its own."""
    with place.consumer("r0", 1):
        rows = _rows("ls", place.path)
    (channel,) = _only(rows, "channel")
    assert (channel["channel"], channel["run"], channel["head"]) == ("policy", "default", 3)
    assert channel["ledger"] == place.url
    assert channel["budget_bytes"] == 10 << 20
    shard = (place.root / "policy" / "step_0" / SHARD).stat().st_size
    versions = _only(rows, "version")
    assert [one["version"] for one in versions] == [0, 1, 2, 3]
    assert [one["parent"] for one in versions] == [None, 0, 1, 2]
    assert {one["state"] for one in versions} == {"published"}
    assert versions[0]["own_bytes"] == versions[0]["bytes"] > shard
    assert all(0 < one["own_bytes"] < shard for one in versions[1:])
    inodes = {
        path.stat().st_ino: path.stat().st_size
        for path in (place.root / "policy").glob("step_*/*")
    }
    assert channel["used_bytes"] == sum(inodes.values()), "what is staged is a link"
    assert [one["pinned_by"] for one in versions] == [[], ["r0"], [], []]
    assert [one["served_by"] for one in versions] == [[], ["r0"], [], []]
    (consumer,) = _only(rows, "consumer")
    assert (consumer["pins"], consumer["acknowledged"], consumer["floor"]) == ([1], 1, 3)
    assert consumer["holds"] == [1]
    assert 20 < consumer["lease_left_s"] <= 30


def test_ls_tells_states_apart(place: Place) -> None:
    """Damaged, missing, left over, not ours, unfinished: each is called by its name."""
    folder = place.root / "policy"
    shutil.rmtree(folder / "step_1")
    with (folder / "step_2" / "config.json").open("ab") as file:
        file.write(b"more")
    _run("verify", place.path, "2", "--mark", code=6)
    place.publish(8)
    shutil.copytree(folder / "step_3", folder / "step_6")
    (folder / "step_5").mkdir()
    shutil.copytree(folder / "step_8", folder / "step_9")
    (folder / ".holdfast/drafts/e9-10-aa").mkdir()
    (folder / ".holdfast/drafts/e1-4-bb").mkdir()
    (folder / ".holdfast/trash/1-cc").mkdir()
    rows = _rows("ls", place.path)
    assert {one["version"]: one["state"] for one in _only(rows, "version")} == {
        0: "published",
        1: "missing",
        2: "damaged",
        3: "published",
        5: "foreign",
        6: "leftover",
        8: "published",
        9: "unfinished",
        10: "unfinished",
    }
    assert [one["path"] for one in _only(rows, "leftover")] == [
        ".holdfast/drafts/e1-4-bb",
        ".holdfast/trash/1-cc",
    ]
    assert "config.json: it has 15 bytes instead of 11" in _run("ls", place.path)


# ---- show --------------------------------------------------------------------------


def test_show(place: Place) -> None:
    """What a version consists of and shares; of a deleted one, what is still known."""
    text = _run("show", place.path, "2", "--tensors")
    assert "parent 1" in text
    assert "kind       model" in text
    (line,) = [line for line in text.splitlines() if line.startswith(SHARD)]
    assert line.endswith("0, 1, 3")
    (line,) = [line for line in text.splitlines() if line.startswith("beta")]
    assert line.split()[1:3] == ["F32", "3x4"]
    assert "2 tensors" in text
    (row,) = _rows("show", place.path, "2")
    assert {one["name"]: one["shared_with"] for one in row["files"]} == {
        SHARD: [0, 1, 3],
        "config.json": [],
    }
    assert "tensors" not in row
    (row,) = _rows("show", place.path, "2", "--tensors")
    assert [one["name"] for one in row["tensors"]] == ["alpha", "beta"]
    _run("sweep", place.path, "--keep-last", "1")
    assert "deleted since; its number is never used again" in _run("show", place.path, "2")
    (row,) = _rows("show", place.path, "2")
    assert (row["type"], row["version"]) == ("swept", 2)
    assert "the newest is 3" in _run("show", place.path, "7", code=4)
    assert "a version is a number" in _run("show", place.path, "--", "-1", code=2)
    (place.root / "policy" / "step_3" / "holdfast.json").write_text("{")
    assert "is not a manifest" in _run("show", place.path, "3")


# ---- verify ------------------------------------------------------------------------


def test_verify_ends_with_6_and_marks_when_told(place: Place) -> None:
    """Sound: 0. A flipped byte in a shared file: 6, told for each version, and marked if told."""
    assert "4 versions verified" in _run("verify", place.path)
    place.publish(4)
    with (place.root / "policy" / "step_0" / SHARD).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    rows = _rows("verify", place.path, code=6)
    assert [(one["version"], one["file"]) for one in _only(rows, "finding")] == [
        (number, SHARD) for number in range(5)
    ]
    assert _only(rows, "verified")[0]["damaged"] == [0, 1, 2, 3, 4]
    text = _run("verify", place.path, "1", code=6)
    assert text.startswith(f"DAMAGED  step_1/{SHARD}: tensor beta differs\n")
    text = _run("verify", place.path, "4", "3", "--mark", code=6)
    assert "marked: 3, 4" in text
    versions = _rows("ls", place.path, only="version")
    assert [one["version"] for one in versions if one["state"] == "damaged"] == [3, 4]
    assert "tensor beta differs" in versions[-1]["problem"]
    assert "version 77 was not published" in _run("verify", place.path, "77", code=4)


# ---- sweep -------------------------------------------------------------------------


def test_sweep_tells_first_and_does_then(place: Place) -> None:
    """A dry run changes nothing and tells exactly what the real one does; held ones stay."""
    folder = place.root / "policy"

    def used() -> int:
        files = [one.stat() for one in folder.glob("step_*/*")]
        return sum({one.st_ino: one.st_size for one in files}.values())

    (folder / ".holdfast/staging/r9-77").mkdir()
    before = used()
    with place.consumer("r0", 1):
        told = _rows("sweep", place.path, "--keep-last", "1", "--dry-run")[0]
        assert _folders(folder) == [f"step_{n}" for n in range(4)]
        assert (folder / ".holdfast/staging/r9-77").exists()
        text = _run("sweep", place.path, "--keep-last", "1", "--dry-run")
        assert "would delete version 0" in text
        assert "would remove .holdfast/staging/r9-77" in text
        assert "r0 holds 1" in text
        done = _rows("sweep", place.path, "--keep-last", "1")[0]
    assert (told.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert told == done
    assert done["deleted"] == [0, 2]
    assert done["freed_bytes"] == before - used() > 0
    assert [one["consumer"] for one in done["holds"]] == ["r0"]
    assert _folders(folder) == ["step_1", "step_3"]
    assert not (folder / ".holdfast/staging/r9-77").exists()


def test_sweep_keeps_what_the_publisher_keeps(place: Place) -> None:
    """Options replace one thing each; nothing is guessed when nothing is known."""
    assert "nothing to delete" in _run("sweep", place.path)
    row = _rows("sweep", place.path, "--keep-every", "2", "--dry-run")[0]
    assert (row["retention"]["keep_last"], row["retention"]["keep_every"]) == (9, 2)
    row = _rows("sweep", place.path, "--max-bytes", "1K", "--dry-run")[0]
    assert row["deleted"] == [0, 1, 2]
    assert row["missing_bytes"] > 0, "the newest is larger than that"
    assert "is not a number of bytes" in _run("sweep", place.path, "--max-bytes", "much", code=2)
    (place.root / "policy/.holdfast/channel.json").unlink()
    lost = ("sweep", place.path, "--ledger", place.url)
    assert "give --keep-last" in _run(*lost, code=2)
    assert "give --keep-last" in _run(*lost, "--max-bytes", "1K", code=2)
    assert "deleted version 0" in _run(*lost, "--keep-last", "3")


def test_sweep_refuses_a_book_that_is_not_this_folders(place: Place, tmp_path: Path) -> None:
    """With the wrong ledger or run everything looks like nobody's: nothing may go."""
    staged = place.root / "policy/.holdfast/staging/r0-1"
    staged.mkdir()
    other = f"sqlite:///{tmp_path}/other.db"
    with ledger.open_sync(other):
        pass
    assert "knows nothing of the channel" in _run("sweep", place.path, "--ledger", other, code=2)
    unknown = ("verify", place.path, "--run", "x")
    assert "knows nothing of the channel" in _run(*unknown, code=2), "nothing to be green about"
    assert "belongs to the run default" in _run("sweep", place.path, "--run", "x", code=2)
    copy = tmp_path / "copy" / "policy"
    shutil.copytree(place.root / "policy", copy)
    for words in (("sweep", str(copy)), ("verify", str(copy), "--mark")):
        assert f"is a copy of {place.path}" in _run(*words, code=2)
    assert "versions verified" in _run("verify", str(copy))
    assert staged.exists()
    assert len(_folders(place.path)) == 4
    assert "change --ledger" in _run("sweep", place.path, "--ledger", "none", code=2)


async def _one_reads(root: Path, number: int, done: Callable[[], None]) -> None:
    subscriber = Subscriber(root, None, "other", "r0", needs="latest")
    async with subscriber as reader, reader.pin(number):
        await asyncio.to_thread(done)


def test_versions_of_another_trainer_are_seen_and_deleted_when_told(place: Place) -> None:
    """Under `--ledger none`, also where nobody of ours has been; looking makes nothing. They stay
    unless --foreign says so, then what is pinned stays, and the newest. With a ledger there is
    nothing to say."""
    folder = place.root / "other"
    for step in range(5):
        foreign(folder, step)
    assert "give --ledger none" in _run("ls", str(folder), code=2)
    where = (str(folder), "--ledger", "none")
    assert "5 versions" in _run("ls", *where)
    assert "only its structure" in _run("verify", *where)
    words = ("sweep", *where, "--keep-last", "1")
    assert _rows(*words, "--dry-run")[0]["deleted"] == []
    assert _rows(*words, "--foreign", "--dry-run")[0]["deleted"] == [0, 1, 2, 3]
    assert not (folder / ".holdfast").exists()
    assert _rows(*words)[0]["deleted"] == []
    assert len(_folders(folder)) == 5

    def sweep() -> None:
        assert _rows(*words, "--foreign")[0]["deleted"] == [0, 1, 3]

    asyncio.run(_one_reads(place.root, 2, sweep))
    assert _folders(folder) == ["step_2", "step_4"]
    assert "leave --foreign out" in _run("sweep", place.path, "--foreign", code=2)


# ---- watch -------------------------------------------------------------------------


@contextlib.contextmanager
def _watching(path: str, log: Path, *more: str) -> Iterator[proc.Child]:
    """A shell that watches."""
    with proc.spawn([*HOLDFAST, "weights", "watch", path, *more], log=log) as child:
        child.wait_until(lambda: "watching" in log.read_text())
        yield child


def test_watch_follows_other_processes(place: Place) -> None:
    """Published by one, pinned and acknowledged by another that leaves, by a third that dies;
    Ctrl-C ends it without a word."""
    log = place.root / "watch.log"
    with _watching(place.path, log, "--json") as child:

        def seen() -> list[tuple[str, int | None, str]]:
            text = log.read_text()
            lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            return [(one["what"], one["version"], one["consumer"]) for one in lines]

        place.publish(7)
        child.wait_until(lambda: ("published", 7, "") in seen())
        with place.consumer("r0", 7) as leaving, place.consumer("r1", 7, lease_s=3) as dying:
            child.wait_until(lambda: ("acknowledged", 7, "r1") in seen())
            leaving.tell("")
            assert leaving.child.wait(HANG_S) == 0
            dying.child.kill_group()
            child.wait_until(lambda: ("lease ended", None, "r1") in seen())
        _run("sweep", place.path, "--keep-last", "1")
        child.wait_until(lambda: ("swept", 0, "") in seen())
        found = seen()
        came = [("joined", None), ("pinned", 7), ("acknowledged", 7)]
        assert [one[:2] for one in found if one[2] == "r0"] == [
            *came,
            ("unpinned", 7),
            ("left", None),
        ]
        assert [one[:2] for one in found if one[2] == "r1"] == [
            *came,
            ("silent", None),
            ("lease ended", None),
        ]
        assert ("opened", None, "") in found
        child.signal(signal.SIGINT)
        assert child.wait(HANG_S) == 130
        assert "Traceback" not in log.read_text()
        assert not log.read_text().splitlines()[-1].startswith("holdfast:")


# ---- marker files ------------------------------------------------------------------


def test_a_channel_without_a_ledger(tmp_path: Path) -> None:
    """The same commands work on marker files, which is what the folder says of itself."""

    async def fill() -> None:
        async with Publisher(tmp_path, None, "policy", Retention(keep_last=9)) as publisher:
            for number in range(3):
                await publisher.publish(number, {"a": np.full(9, number)})

    asyncio.run(fill())
    path = str(tmp_path / "policy")
    rows = _rows("ls", path)
    assert [one["version"] for one in _only(rows, "version")] == [0, 1, 2]
    assert rows[0]["ledger"] is None
    assert "marker files" in _run("ls", path)
    foreign = tmp_path / "policy" / "step_9"
    foreign.mkdir()
    shutil.copy(tmp_path / "policy" / "step_2" / SHARD, foreign / SHARD)
    (foreign / "STABLE").touch()
    assert "only its structure was checked" in _run("verify", path)
    assert "no manifest" in _run("show", path, "9")
    log = tmp_path / "watch.log"
    with _watching(path, log, "--count", "1") as child:
        assert "deleted version 0" in _run("sweep", path, "--keep-last", "3")
        assert child.wait(HANG_S) == 0
    assert "swept" in log.read_text()
    other = f"sqlite:///{tmp_path}/x.db"
    assert "is kept with marker files" in _run("ls", path, "--ledger", other, code=2)
    (foreign / SHARD).write_bytes(b"short")
    (foreign / "STABLE").touch()
    assert "DAMAGED" in _run("verify", path, "9", code=6)


# ---- where is the channel? -----------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("polcy", 4, "is not there: check the path"),
        ("ledger.db", 4, "a file, not a folder"),
        ("policy/step_2", 2, "name the channel, {root}/policy"),
        ("policy/.holdfast", 2, "name the channel, {root}/policy"),
        ("policy/.holdfast/drafts", 2, "name the channel, {root}/policy"),
        ("", 2, "channels are in it: name {root}/policy"),
        ("empty", 2, "is not a channel"),
        ("renamed", 2, "give it its name back"),
    ],
)
def test_a_bad_path_says_what_to_type(place: Place, path: str, code: int, said: str) -> None:
    """Whatever is not a channel's folder is told with what to name instead."""
    if path == "empty":
        (place.root / path).mkdir()
    if path == "renamed":
        shutil.copytree(place.path, place.root / path)
    assert said.format(root=place.root) in _run("ls", str(place.root / path), code=code)


def test_paths_may_be_written_in_many_ways(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, path in ((place.root, "policy/"), (place.path, "."), (place.path, "step_0/..")):
        monkeypatch.chdir(folder)
        assert "4 versions" in _run("ls", path)


def test_the_ledger_is_found_or_asked_for(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder knows it. Where it does not, or not its password, the environment may."""
    about = place.root / "policy/.holdfast/channel.json"
    said = json.loads(about.read_text())

    def say(url: str | None) -> None:
        about.write_text(json.dumps({**said, "ledger": url}))

    nowhere, variable = "sqlite:////nowhere/x.db", "HOLDFAST_LEDGER"
    monkeypatch.setenv(variable, nowhere)
    assert "4 versions" in _run("ls", place.path), "the folder knows better"
    for known in ("", "etcd://me@127.0.0.1:1"):
        say(known)
        monkeypatch.setenv(variable, nowhere)
        assert "no ledger at /nowhere/x.db" in _run("ls", place.path, code=4)
        monkeypatch.setenv(variable, place.url)
        assert "4 versions" in _run("ls", place.path)
        monkeypatch.delenv(variable)
        assert variable in _run("ls", place.path, code=2)
    say("")
    assert "give --ledger URL" in _run("ls", place.path, code=2)
    assert "4 versions" in _run("ls", place.path, "--ledger", place.url)
    say("memory:x")
    assert "inside one process" in _run("ls", place.path, code=2)
    say("etcd://someone@127.0.0.1:1")
    assert "needs a password" in _run("ls", place.path, code=2)
    say(f"sqlite:///{tmp_path}/gone.db")
    assert "there is no ledger at" in _run("ls", place.path, code=4)
    assert not (tmp_path / "gone.db").exists(), "looking does not create"
    about.write_text("{")
    assert "cannot be read" in _run("ls", place.path, code=6)
    place.publish()
    assert json.loads(about.read_text()) == said, "the next publisher writes it anew"


def test_what_a_folder_says_of_itself(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ledger, run and retention; written again only when that changes."""
    about = place.root / "policy/.holdfast/channel.json"
    assert json.loads(about.read_text()) == {
        "schema": 1,
        "run": "default",
        "channel": "policy",
        "folder": place.path,
        "ledger": place.url,
        "retention": KEEP.model_dump(mode="json"),
    }
    inode = about.stat().st_ino
    place.publish()
    assert about.stat().st_ino == inode
    place.publish(retention=Retention(keep_last=4))
    assert json.loads(about.read_text())["retention"]["keep_last"] == 4
    monkeypatch.chdir(place.root)
    for given, lasting in (
        ("sqlite:///a%20b.db?sync=full", f"sqlite:///{place.root}/a%20b.db?sync=full"),
        ("sqlite:////x:y@z/l.db", "sqlite:////x%3Ay%40z/l.db"),
        ("etcd://me:secret@h:1,k:2?timeout=3", "etcd://me@h:1,k:2?timeout=3"),
        ("memory:x", "memory:x"),
    ):
        assert ledger.open(given).url == lasting


# ---- packages, numbers ---------------------------------------------------------------

BLOCKED = """
import sys
sys.modules[sys.argv[1]] = None
sys.argv[:2] = ["holdfast"]
from holdfast.cli import main
main()
"""


@pytest.mark.parametrize("package", ["numpy", "xxhash"])
def test_a_missing_package_is_named(package: str) -> None:
    """One line that says what to install; everything else goes on working."""
    for words, code in ((["weights", "ls", "x"], 2), (["--help"], 0), (["faults"], 0)):
        argv = [sys.executable, "-c", BLOCKED, package, *words]
        result = subprocess.run(argv, capture_output=True, text=True)
        assert result.returncode == code, result.stderr
        if code:
            assert result.stderr.startswith(f"holdfast: {package} is not installed")
            assert "holdfast-rl[weights]" in result.stderr
            assert len(result.stderr.splitlines()) == 1


def test_sizes() -> None:
    """Numbers of bytes as people write them."""
    for text, count in (
        ("0", 0),
        ("512", 512),
        ("10G", 10 << 30),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3k", 3 << 10),
    ):
        assert parse_bytes(text) == count
