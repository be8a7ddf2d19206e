"""What whoever uses the weights for the first time runs into: each call, and each command, says
what happened and what to do, and does not look as if it had done what it has not."""

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from holdfast import proc, servers
from holdfast.errors import (
    Denied,
    Mistake,
    NoRoom,
    NotFound,
    TimedOut,
    UnknownOutcome,
)
from holdfast.ledger.memory import MemoryLedger
from holdfast.timeouts import DEFAULTS
from holdfast.weights import (
    Publisher,
    Retention,
    Subscriber,
    Version,
    open_publisher,
    open_subscriber,
    write_part,
)
from holdfast.weights.channel import Channel
from holdfast.weights.local import LocalDisk
from patience import HANG_S
from weights import family
from weights.command import rows, run
from weights.ledgers import Lossy

EVERYTHING = Retention(keep_last=99)
weights = functools.partial(family.weights, items=500)
POWERLESS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture(params=["sqlite", "markers"])
def where(request: pytest.FixtureRequest, url: str) -> str | None:
    """The URL of a ledger, or None for marker files."""
    return url if request.param == "sqlite" else None


def powerless(*args: str) -> subprocess.CompletedProcess[str]:
    """The command as somebody to whom permissions apply, which root has to give up for."""
    argv = [sys.executable, "-m", "holdfast", *args]
    if os.geteuid() == 0:
        argv = [*POWERLESS, *argv]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


def published(root: Path, url: str | None, count: int = 3) -> str:
    """A channel with a few versions; returns its path."""
    with open_publisher(root, url, "policy", EVERYTHING) as publisher:
        for number in range(count):
            publisher.publish(number, weights(number))
    return str(root / "policy")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


# ---- sweeping -------------------------------------------------------------------------


def test_a_sweep_counts_only_what_it_removed(tmp_path: Path, url: str) -> None:
    """Folders that another ledger knows stay, are told of, and free nothing."""
    aside = tmp_path / "aside"
    other = f"sqlite:///{tmp_path}/other.db"
    with open_publisher(aside, other):  # the other ledger knows the channel, and no version
        pass
    path = published(tmp_path, url)
    (aside / "policy/.holdfast/channel.json").replace(f"{path}/.holdfast/channel.json")
    shutil.rmtree(aside)
    words = ("weights", "sweep", path, "--ledger", other)
    for more in ((), ("--dry-run",)):
        text = run(*words, *more)
        assert "3 folders lie beyond the newest version" in text
        assert "nothing to delete" in text
        assert "0 B " in text.splitlines()[-1]
        assert not text.splitlines()[-1].endswith(" 0 B left in use")
    assert len(list((tmp_path / "policy").glob("step_*"))) == 3
    row = json.loads(run(*words, "--json"))
    assert (row["freed_bytes"], row["beyond"]) == (0, [0, 1, 2])


@pytest.mark.parametrize("locked", ["", ".holdfast/trash", "step_0"])
def test_who_may_not_delete_gives_nothing_up(tmp_path: Path, url: str, locked: str) -> None:
    """Permissions are looked at before the first version is given up in the ledger."""
    path = published(tmp_path, url)
    with mode(Path(path, locked), 0o555):
        result = powerless("weights", "sweep", path, "--keep-last", "1")
    assert result.returncode == Denied.exit_code, result.stderr
    assert "no right to write in" in result.stderr
    assert "deleted" not in run("weights", "show", path, "0")


# ---- publishing -----------------------------------------------------------------------


async def test_mistakes_are_called_mistakes(tmp_path: Path) -> None:
    """A wrong kind, a module instead of its state dict, a rank twice, a pin that was left."""
    wrong: Any = "lora"
    module: Any = torch.nn.Linear(2, 2)
    async with MemoryLedger() as led, Publisher(tmp_path, led) as publisher:
        with pytest.raises(Mistake, match="'model' or 'adapter', not 'lora'"):
            await publisher.publish(0, weights(0), kind=wrong)
        with pytest.raises(Mistake, match="'model' or 'adapter'"):
            await publisher.begin(0, kind=wrong)
        with pytest.raises(Mistake, match=r"pass its state_dict\(\)"):
            await publisher.publish(0, module)
        ticket = await publisher.begin(0)
        with pytest.raises(Mistake, match=r"state_dict\(\)"):
            await write_part(LocalDisk(), ticket, 0, module)
        await write_part(LocalDisk(), ticket, 0, weights(0))
        for other in (weights(0), {"v": np.ones(3)}):
            with pytest.raises(Mistake, match="once per rank"):
                await write_part(LocalDisk(), ticket, 0, other)
        await publisher.finish(ticket, 1)  # what was written first still counts
        async with Subscriber(tmp_path, led) as subscriber:
            async with subscriber.pin() as pin:
                kept = pin.torch("w")
            for late in (pin.state_dict, lambda: pin.raw("w"), lambda: pin.numpy("w")):
                with pytest.raises(Mistake, match="was left"):
                    late()
            with pytest.raises(Mistake, match="was left"):
                await pin.stage()
            assert kept[0] == 0


@pytest.mark.parametrize("what", ["file", "link", "link to a folder"])
async def test_what_is_in_the_way_is_named(tmp_path: Path, what: str) -> None:
    """Something that is no folder where a version is to go."""
    async with MemoryLedger() as led, Publisher(tmp_path, led) as publisher:
        there = tmp_path / "policy/step_0"
        if what == "file":
            there.touch()
        else:
            there.symlink_to("/nowhere" if what == "link" else tmp_path)
        with pytest.raises(Mistake, match=r"policy/step_0 is in the way.*move it"):
            await publisher.publish(0, weights(0))
        there.unlink()
        await publisher.publish(0, weights(0))


@pytest.mark.parametrize("lose", ["call", "answer"])
async def test_finish_can_be_called_again_after_doubt(
    tmp_path: Path, lose: Literal["call", "answer"]
) -> None:
    """It says whether the version was published; nobody was fenced, so nobody has to stop."""
    async with Lossy(lose) as led, Publisher(tmp_path, led) as publisher:
        for number in (0, 1):
            first = await publisher.begin(number)
            await write_part(LocalDisk(), first, 0, weights(number))
            led.lose = "/head"
            with pytest.raises(UnknownOutcome):
                await publisher.finish(first, 1)
            led.away = False
            if lose == "answer":
                assert isinstance(await publisher.finish(first, 1), Version)
                continue
            for _ in range(2):
                with pytest.raises(Mistake, match="begin it again"):
                    await publisher.finish(first, 1)
            again = await publisher.begin(number)
            await write_part(LocalDisk(), again, 0, weights(number))
            await publisher.finish(again, 1)
        assert (await publisher._book.view()).head == 1


async def test_what_ranks_have_really_written_counts(tmp_path: Path) -> None:
    """Whoever says nothing about its size beforehand is held to the budget in the end."""
    budget = Retention(keep_last=9, max_bytes=20_000, when_full="fail")
    async with (
        MemoryLedger() as led,
        Publisher(tmp_path, led, retention=budget) as publisher,
        Subscriber(tmp_path, led, consumer="slow"),
    ):
        with pytest.raises(NoRoom, match="slow holds 0"):
            for number in range(8):
                ticket = await publisher.begin(number)
                await write_part(LocalDisk(), ticket, 0, weights(number))
                await publisher.finish(ticket, 1)
        used = sum(one.stat().st_size for one in tmp_path.glob("policy/step_*/*"))
        assert budget.max_bytes / 2 < used <= budget.max_bytes


async def test_a_full_disk_names_who_holds_what(tmp_path: Path) -> None:
    """Beside what the system says, in units that people read."""

    class Full(Publisher):
        async def _seal(self, *args: Any) -> Any:
            if args[1].step == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return await super()._seal(*args)

    async with (
        MemoryLedger() as led,
        Full(tmp_path, led, retention=Retention(keep_last=1)) as publisher,
        Subscriber(tmp_path, led, consumer="slow"),
    ):
        for number in (0, 1):
            await publisher.publish(number, weights(number))
        with pytest.raises(NoRoom, match=r"No space left.*slow holds 0 \(4\.\d KiB\)"):
            await publisher.publish(2, weights(2))


async def test_a_publisher_that_waits_says_so(
    world: family.House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and then now and then, in the log that everybody sees; it goes on when the
    consumer lets go."""
    hasty = DEFAULTS.model_copy(update={"room_tell_s": 0.05})
    monkeypatch.setattr(Channel, "timeouts", hasty)
    async with (
        asyncio.timeout(HANG_S),
        world.publisher(keep_last=1, max_bytes=12_000) as publisher,
        world.subscriber("stuck", needs="every") as stuck,
    ):
        with caplog.at_level(logging.WARNING, "holdfast"):
            for number in (0, 1):
                await publisher.publish(number, weights(number))
            waiting = asyncio.create_task(publisher.publish(2, weights(2)))
            while len(caplog.records) < 3:
                await asyncio.sleep(0.01)
            async with stuck.pin(1) as pin:
                await stuck.acknowledge(pin.number)
            await waiting
        said = caplog.records[-1].getMessage()
        assert said.startswith("version 2 waits for ")
        assert "KiB: stuck holds 0 (" in said


# ---- subscribing ----------------------------------------------------------------------


def test_who_waits_at_the_wrong_place_is_told_where(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Folder and ledger are named; nothing is made where nothing was."""
    published(tmp_path, url)
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        open_subscriber(tmp_path, url, "polcy") as subscriber,
    ):
        assert f"{tmp_path}/polcy" in caplog.text
        place = rf"{tmp_path}/polcy \({url}, run default\).*no publisher was ever there"
        with pytest.raises(TimedOut, match=place):
            subscriber.wait_newer(None, timeout_s=0.1)
        with pytest.raises(NotFound, match=place), subscriber.pin():
            pass
    assert not (tmp_path / "polcy").exists()


def test_who_finds_only_damaged_versions_is_told_so(tmp_path: Path, where: str | None) -> None:
    """That is not the same as nothing having been published."""
    path = published(tmp_path, where, 2)
    for shard in Path(path).glob("step_*/*.safetensors"):
        shard.write_bytes(b"x")
    run("weights", "verify", path, "--mark", code=6)
    with open_subscriber(tmp_path, where) as subscriber:
        with pytest.raises(NotFound, match="all 2 versions are marked as damaged"):
            subscriber.pin().__enter__()
        with pytest.raises(TimedOut, match="all 2 versions are marked as damaged"):
            subscriber.wait_newer(None, timeout_s=0.1)


class Shut(MemoryLedger):
    """A ledger that denies everything for a while."""

    denied = False

    async def _grant(self, ttl_s: float) -> Any:
        if self.denied:
            self.asked.set()
            raise Denied("the password has changed")
        return await super()._grant(ttl_s)

    asked: asyncio.Event


async def test_a_consumer_goes_on_trying_to_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after an error that is no matter of waiting: an idle replica would never return."""
    async with (
        asyncio.timeout(HANG_S),
        Shut() as led,
        Publisher(tmp_path, led) as publisher,
        Subscriber(tmp_path, led, consumer="r0") as subscriber,
    ):
        await publisher.publish(0, weights(0))
        first, led.asked, led.denied = subscriber.seat_id, asyncio.Event(), True
        await led.revoke(int(first.rpartition("-")[2]))
        assert subscriber._seat is not None
        subscriber._seat.lost.set()
        await led.asked.wait()
        led.denied = False
        while subscriber.seat_id == first:
            await asyncio.sleep(0.01)
        assert "r0 cannot take its seat again: the password has changed" in caplog.text


# ---- commands -------------------------------------------------------------------------


def test_who_may_only_read_can_look(tmp_path: Path) -> None:
    """With marker files: everything but the exact time is there to be seen."""
    path = published(tmp_path, None)
    with contextlib.ExitStack() as stack:
        for one in (Path(path), *Path(path).rglob("*")):
            if one.is_dir():
                stack.enter_context(mode(one, 0o555))
        for command in ("ls", "verify"):
            result = powerless("weights", command, path)
            assert result.returncode == 0, result.stderr
        result = powerless("weights", "sweep", path, "--keep-last", "1")
        assert result.returncode == Denied.exit_code


def test_what_was_given_up_and_is_still_there_is_a_leftover(
    tmp_path: Path, where: str | None
) -> None:
    """It is not damaged: nobody is to mend it, and `verify` is green."""
    published(tmp_path, where)

    code = f"""
from holdfast.weights import Retention, open_publisher
open_publisher({str(tmp_path)!r}, {where!r}, "policy", Retention(keep_last=1))
"""
    plan = {"HOLDFAST_FAULTS": "weights.sweep.recorded:kill", **os.environ}
    killed = subprocess.run([sys.executable, "-c", code], env=plan, check=False)
    assert killed.returncode == -9
    path = str(tmp_path / "policy")
    found = rows("weights", "ls", path, only="version")
    states = {row["version"]: row["state"] for row in found}
    assert states == {0: "leftover", 1: "published", 2: "published"}
    (tmp_path / "policy/step_0/model.safetensors").unlink()
    text = run("weights", "verify", path)
    assert "2 versions verified" in text
    assert "step_0" in text
    assert "deleted" in run("weights", "verify", path, "0", code=4)
    assert "removed step_0" in run("weights", "sweep", path) or where is None


@pytest.mark.long
@pytest.mark.etcd
def test_watch_tells_when_the_ledger_is_away(tmp_path: Path) -> None:
    """Silence because nothing happens is told from silence because nobody is reached."""
    log = tmp_path / "watch.log"
    with servers.EtcdServer(tmp_path / "etcd") as server:
        published(tmp_path, f"etcd://{server.host}:{server.port}")
        argv = [sys.executable, "-m", "holdfast", "weights", "watch", str(tmp_path / "policy")]
        with proc.spawn(argv, log=log) as child:
            child.wait_until(lambda: "watching" in log.read_text())
            server.kill()
            child.wait_until(lambda: "ledger away" in log.read_text(), 60)
            server.restart()
            child.wait_until(lambda: "ledger back" in log.read_text(), 60)
