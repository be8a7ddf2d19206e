"""What an agent must survive: a dead warden, a full disk, workers that will not die, bad calls."""

import asyncio
import contextlib
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from holdfast.errors import Mistake, NoRoom, TimedOut, UnknownOutcome
from holdfast.launch import agent, commands, flags
from holdfast.launch.commands import launch
from holdfast.launch.crew import Leaving, NodeCrew, Plan
from holdfast.launch.identity import Identity
from holdfast.launch.logs import CycleLogs, Logs, Streams
from holdfast.launch.spec import Seat, Spec
from holdfast.launch.warden import Warden, boottime_s
from holdfast.launch.workers import Workers
from holdfast.ledger.runtime import LiveRuntime
from holdfast.rendezvous.overview import say
from holdfast.rendezvous.records import Cause, Keys, Place, Rules
from holdfast.rendezvous.rendezvous import Rendezvous
from kids import alive
from launch.node import numbers
from patience import HANG_S, auntil
from rendezvous.meeting import RUN, working
from through import Through

DEAF = "trap '' TERM; echo $$ >> FOLDER/pids; while :; do sleep 0.05; done"


class FullLogs(Logs, frozen=True, kw_only=True):
    """Logs on a disk without room."""

    def cycle(self, seat: Seat) -> CycleLogs:
        raise NoRoom(f"the log folder of cycle {seat.place.cycle}: no space left on device")


class ACrew:
    """The crew of a node, without its agent; `text` is what the shell runs as a worker."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        slots: int = 1,
        valid_s: float = 60.0,
        logs: type[Logs] = Logs,
        **changes: float,
    ) -> None:
        args = ("-c", text.replace("FOLDER", str(folder)))
        self.plan = Plan(
            run="r",
            identity=Identity(name="n0"),
            address="127.0.0.1",
            ledger_url=f"sqlite:///{folder}/ledger.db",
            spec=Spec(entry="sh", kind="program", args=args, slots=slots, env=dict(os.environ)),
            rules=Rules(minimum=1, maximum=1, join_s=20.0),
            logs=logs(folder=folder / "logs", redirects=Streams.BOTH, tee=Streams.NONE),
            **({"lease_s": 10.0, "grace_s": 5.0} | changes),  # type: ignore[arg-type]
        )
        self.warden = Warden()
        self.crew = NodeCrew(self.plan, pool=None, warden=self.warden)
        until_s = boottime_s() + valid_s
        self.crew.rendezvous = cast(Rendezvous, SimpleNamespace(valid_until=until_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimedOut):
            await self.crew.stop(None)
        await self.warden.close()

    async def start(self) -> None:
        """Start the workers of a node that is alone."""
        slots = self.plan.spec.slots
        await self.crew.start(Place(1, 7, 0, 1, 0, slots, slots, "127.0.0.1", 29_500))

    async def outcome(self) -> Cause | None:
        """How the workers have ended."""
        async with asyncio.timeout(HANG_S):
            return await self.crew.outcome()

    async def leaves(self) -> str:
        """The node takes part, and leaves because it cannot work; returns why."""
        async with asyncio.timeout(HANG_S):
            code, reason = await agent._take_part(self.plan, self.crew)
        assert code == 70
        return reason

    async def kill_warden(self) -> None:
        """The warden dies, and the agent hears of it."""
        os.kill(self.warden.pid, signal.SIGKILL)
        await auntil(self.warden.failed.done, "the warden's end")


# ---- workers that are still there --------------------------------------------------------


async def test_a_new_cycle_in_the_middle_of_a_stop_leaves_no_worker_behind(
    tmp_path: Path,
) -> None:
    """One worker fails, the other will not end; others have opened the next cycle meanwhile."""
    fails = "until [ -e FOLDER/pids ]; do sleep 0.05; done; exit 3"
    text = f"[ $LOCAL_RANK = 1 ] || {{ {fails}; }}; {DEAF}"
    async with ACrew(tmp_path, text, slots=2, grace_s=1.0) as here:
        await here.start()
        cause = await here.outcome()
        [pid] = numbers(tmp_path / "pids", 1)
        assert alive(pid), "the failure is reported before anything is stopped"
        crew = here.crew
        stop = asyncio.create_task(crew.stop(cause))
        await auntil(lambda: crew._workers is None or crew._workers._stopping, "a stop")
        stop.cancel()
        await asyncio.wait([stop])
        await crew.stop(Cause(kind="failed"))
        assert not alive(pid)


async def test_the_second_signal_counts_also_while_workers_are_being_started(
    tmp_path: Path,
) -> None:
    """Workers that ignore SIGTERM are not waited for, whenever the signals came."""
    async with ACrew(tmp_path, DEAF, slots=2, grace_s=30.0) as here:
        here.crew.leave(Leaving("SIGTERM", 143))
        here.crew.kill()
        await here.start()
        await asyncio.to_thread(numbers, tmp_path / "pids", 2)
        began = time.monotonic()
        await here.crew.stop(None)
        assert time.monotonic() - began < 20  # the grace is 30 s


async def test_a_worker_that_cannot_be_killed_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say that it is ready while a worker hangs in the kernel: it leaves, with 70."""
    stop = Workers.stop

    async def hangs(self: Workers, grace_s: float) -> None:
        await stop(self, grace_s)
        raise TimedOut("processes 7 cannot be killed: they hang in the kernel")

    monkeypatch.setattr(Workers, "stop", hangs)
    async with ACrew(tmp_path, "exit 3") as here:
        assert "cannot be killed" in await here.leaves()


# ---- a node that cannot work --------------------------------------------------------------


async def test_a_node_whose_warden_died_before_it_got_a_rank_leaves(tmp_path: Path) -> None:
    """It does not take the rank, fail to start and come back for it, for ever."""
    async with ACrew(tmp_path, "sleep 60") as here:
        await here.kill_warden()
        assert "warden" in await here.leaves()


async def test_a_spare_whose_warden_died_leaves_at_once(tmp_path: Path) -> None:
    """And not when it is needed."""
    async with ACrew(tmp_path, "sleep 60") as here:
        leaving = asyncio.create_task(here.crew.leaving())
        await here.kill_warden()
        async with asyncio.timeout(HANG_S):
            assert "warden" in await leaving
        assert here.crew.left is not None
        assert here.crew.left.exit_code == 70


async def test_a_node_with_a_full_disk_leaves(tmp_path: Path) -> None:
    """Its workers cannot start there: it does not come back for its rank, for ever."""
    async with ACrew(tmp_path, "sleep 60", logs=FullLogs) as here:
        assert "no space left" in await here.leaves()


async def test_workers_that_the_warden_stopped_did_not_fail(tmp_path: Path) -> None:
    """The agent was late, or the ledger: that is not held against the workers' budget."""
    async with ACrew(tmp_path, "sleep 60", lease_s=1.0, valid_s=0.9) as here:
        await here.start()
        cause = await here.outcome()
        assert cause is not None
        assert cause.kind == "lost"


async def test_stacks_that_cannot_be_written_stop_nobody_from_stopping(tmp_path: Path) -> None:
    """A full disk is no reason to leave hanging workers running."""
    async with ACrew(tmp_path, DEAF, grace_s=0.2) as here:
        await here.start()
        [pid] = await asyncio.to_thread(numbers, tmp_path / "pids", 1)
        (tmp_path / "logs" / "r" / "cycle_1" / "stacks_n0.txt").mkdir()
        await here.crew.stop(Cause(kind="hung"))
        assert not alive(pid)


def test_a_terminal_that_has_gone_away_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads what the agent says: it goes on."""
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        say("cycle 2: node 0 of 1")
        say("cycle 3: node 0 of 1")
    with contextlib.suppress(OSError):
        gone.close()


# ---- draining ------------------------------------------------------------------------------


async def test_draining_at_once_costs_one_cycle_and_says_when(tmp_path: Path) -> None:
    """Also when the answer is lost, and the next cycle runs before anybody looks again."""
    async with working(f"sqlite:///{tmp_path}/ledger.db") as here:
        lost: list[str] = []

        async def late(name: str, _: object) -> None:
            if name == "txn" and not lost:
                lost.append(name)
                await here.cycles(2, "n1")
                raise UnknownOutcome("no answer")

        through: Any = Through(here.ledger, after=late)
        runtime = LiveRuntime(through)
        cycle = (await here.look()).cycle
        await commands._next_cycle(runtime, Keys(RUN), cycle, Cause(kind="drained", node="n0"))
        view = await here.look()
        assert view.cycle.number == 2
        assert abs(view.cycle.history[-1].at - time.time()) < 60


# ---- bad calls, paths, secrets -------------------------------------------------------------


def resolved(*args: str) -> Plan:
    """What `holdfast launch` makes of a call."""
    context = launch.make_context("launch", list(args))
    given = dict(context.params)
    return flags.resolve(given.pop("entry"), given.pop("args"), given)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("HOLDFAST_LEDGER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_workers_are_led_to_the_ledger_whatever_folder_they_are_in(home: Path) -> None:
    """A relative path would lead a worker that changes its folder to another, empty ledger."""
    (home / "ca.pem").write_text("")
    etcd = "etcd://me:p%40ss,word@127.0.0.1:2379,127.0.0.2:2379?ca="
    for given, meant in (
        ("sqlite:///mine.db", f"sqlite:///{home}/mine.db"),
        ("sqlite:///a@b/mine.db", f"sqlite:///{home}/a%40b/mine.db"),
        (f"{etcd}ca.pem", f"{etcd}{home}/ca.pem"),
    ):
        assert resolved("--ledger", given, "x.py").ledger_url == meant


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "url",
    ["etcd://127.0.0.1:port", "etcd://127.0.0.1:99999", "etcd://me:geheim,secret@127.0.0.1:x"],
)
def test_a_ledger_url_that_is_none_is_a_mistake_and_its_password_is_not_told(url: str) -> None:
    """One clear line, without the password."""
    with pytest.raises(Mistake) as told:
        resolved("--ledger", url, "x.py")
    assert "secret" not in str(told.value)
    assert "geheim" not in str(told.value)


@pytest.mark.usefixtures("home")
def test_a_password_is_not_shown() -> None:
    """`--dry-run` is for people, and for tickets."""
    plan = resolved("--ledger", "etcd://me:geheim,secret@127.0.0.1:2379", "x.py")
    shown = flags.describe(plan)
    assert "geheim" not in shown
    assert "secret" not in shown
    assert "etcd://me@127.0.0.1:2379" in shown


def test_what_a_run_leaves_on_disk_is_for_its_owner_only(home: Path) -> None:
    """Logs hold whatever workers print; the folder is made private whoever makes it first."""
    before = os.umask(0o022)
    try:
        resolved("--ledger", "memory:mine", "x.py")
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / "holdfast").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "args",
    [
        ("--lease", "nan"),
        ("--lease", "inf"),
        ("--grace", "nan"),
        ("--grace", "-1"),
        ("--grace", "inf"),
        ("--hang-after", "0"),
        ("--hang-after", "nan"),
        ("--join-timeout", "inf"),
        ("--last-call", "nan"),
        ("--log-dir", "file"),
        ("--domain", "rack\udcff"),
    ],
    ids=ascii,
)
def test_values_that_make_no_sense_are_mistakes(home: Path, args: tuple[str, ...]) -> None:
    """Refused before anything is started or written."""
    (home / "file").write_text("")
    with pytest.raises(Mistake):
        resolved("--ledger", "memory:mine", *args, "x.py")
