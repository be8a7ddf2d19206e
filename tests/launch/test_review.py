"""What an agent must survive: a dead warden, a full disk, workers that will not die, bad calls."""

import asyncio
import contextlib
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.errors import Mistake, NoRoom, TimedOut, UnknownOutcome
from holdfast.launch import agent, commands, flags
from holdfast.launch.commands import launch
from holdfast.launch.crew import Leaving, NodeCrew, Settings
from holdfast.launch.identity import Identity
from holdfast.launch.logs import CycleLogs, Logs, Streams
from holdfast.launch.spec import Seat, Spec
from holdfast.launch.warden import Warden, boottime_s
from holdfast.launch.workers import Workers
from holdfast.ledger.base import Ledger
from holdfast.ledger.runtime import LiveRuntime
from holdfast.rendezvous.records import Cause, Keys, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from launch.node import alive, auntil, numbers
from patience import HANG_S
from rendezvous.meeting import RUN, meeting

PLACE = Place(1, 7, 0, 1, 0, 2, 2, "127.0.0.1", 29_500)
RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=0.2, settle_s=0.2, join_s=20.0)
DEAF = "trap '' TERM; echo $$ >> {0}/pids; while :; do sleep 0.05; done"


class FullLogs(Logs, frozen=True, kw_only=True):
    """Logs on a disk without room."""

    def cycle(self, seat: Seat) -> CycleLogs:
        raise NoRoom(f"the log folder of cycle {seat.cycle}: no space left on device")


@contextlib.asynccontextmanager
async def a_crew(
    folder: Path, text: str, *, slots: int = 2, grace_s: float = 5.0, **changes: Any
) -> AsyncIterator[tuple[NodeCrew, Warden, agent.Plan]]:
    """The crew of a node, without its agent; `text` is what the shell runs as a worker."""
    warden = Warden()
    spec = Spec(
        entry="sh",
        kind="program",
        args=("-c", text.format(folder)),
        slots=slots,
        env=dict(os.environ),
    )
    settings = Settings(
        run="r",
        node="n0",
        address="127.0.0.1",
        ledger_url=f"sqlite:///{folder}/ledger.db",
        max_restarts=3,
        lease_s=changes.get("lease_s", 10.0),
        grace_s=grace_s,
    )
    kind = changes.get("logs", Logs)
    logs = kind(folder=folder / "logs", redirects=Streams.BOTH, tee=Streams.NONE)
    crew = NodeCrew(spec, settings, logs, pool=None, warden=warden, say=lambda _: None)
    until_s = boottime_s() + changes.get("valid_s", 60.0)
    crew.rendezvous = cast(Rendezvous, SimpleNamespace(valid_until=until_s))
    rules = Rules(minimum=1, maximum=1, join_s=20.0)
    plan = agent.Plan(
        spec=spec,
        settings=settings,
        identity=Identity(name="n0"),
        rules=rules,
        logs=logs,
        warm=False,
    )
    try:
        yield crew, warden, plan
    finally:
        with contextlib.suppress(TimedOut):
            await crew.stop(None)
        await warden.close()


# ---- workers that are still there --------------------------------------------------------


async def test_a_new_cycle_in_the_middle_of_a_stop_leaves_no_worker_behind(
    tmp_path: Path,
) -> None:
    """One worker fails, the other will not end; others have opened the next cycle meanwhile."""
    text = "[ $LOCAL_RANK = 1 ] || { until [ -e {0}/pids ]; do sleep 0.05; done; exit 3; }; "
    text = text.replace("{ until", "{{ until").replace("exit 3; }", "exit 3; }}") + DEAF
    async with a_crew(tmp_path, text, grace_s=1.0) as (crew, _, _plan):
        await crew.start(PLACE)
        async with asyncio.timeout(HANG_S):
            cause = await crew.outcome()
        [pid] = numbers(tmp_path / "pids", 1)
        assert alive(pid), "the failure is reported before anything is stopped"
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
    async with a_crew(tmp_path, DEAF, grace_s=30.0) as (crew, _, _plan):
        crew.leave(Leaving("SIGTERM", 143))
        crew.kill()
        await crew.start(PLACE)
        await asyncio.to_thread(numbers, tmp_path / "pids", 2)
        began = time.monotonic()
        await crew.stop(None)
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
    async with a_crew(tmp_path, "exit 3", slots=1) as (crew, _, plan):
        async with asyncio.timeout(HANG_S):
            code, reason = await agent._take_part(plan, crew)
        assert code == 70
        assert "cannot be killed" in reason


# ---- a node that cannot work --------------------------------------------------------------


async def test_a_node_whose_warden_died_before_it_got_a_rank_leaves(tmp_path: Path) -> None:
    """It does not take the rank, fail to start and come back for it, for ever."""
    async with a_crew(tmp_path, "sleep 60", slots=1) as (crew, warden, plan):
        os.kill(warden.pid, signal.SIGKILL)
        await auntil(warden.failed.done, "the warden's end")
        async with asyncio.timeout(HANG_S):
            code, reason = await agent._take_part(plan, crew)
        assert code == 70
        assert "warden" in reason


async def test_a_spare_whose_warden_died_leaves_at_once(tmp_path: Path) -> None:
    """And not when it is needed."""
    async with a_crew(tmp_path, "sleep 60", slots=1) as (crew, warden, _):
        leaving = asyncio.create_task(crew.leaving())
        os.kill(warden.pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            assert "warden" in await leaving
        assert crew.left is not None
        assert crew.left.exit_code == 70


async def test_a_node_with_a_full_disk_leaves(tmp_path: Path) -> None:
    """Its workers cannot start there: it does not come back for its rank, for ever."""
    async with a_crew(tmp_path, "sleep 60", slots=1, logs=FullLogs) as (crew, _, plan):
        async with asyncio.timeout(HANG_S):
            code, reason = await agent._take_part(plan, crew)
        assert code == 70
        assert "no space left" in reason


async def test_workers_that_the_warden_stopped_did_not_fail(tmp_path: Path) -> None:
    """The agent was late, or the ledger: that is not held against the workers' budget."""
    async with a_crew(tmp_path, "sleep 60", slots=1, lease_s=1.0, valid_s=0.9) as (crew, *_):
        await crew.start(PLACE_OF_ONE)
        async with asyncio.timeout(HANG_S):
            cause = await crew.outcome()
        assert cause is not None
        assert cause.kind == "lost"


async def test_stacks_that_cannot_be_written_stop_nobody_from_stopping(tmp_path: Path) -> None:
    """A full disk is no reason to leave hanging workers running."""
    async with a_crew(tmp_path, DEAF, slots=1, grace_s=0.2) as (crew, *_):
        await crew.start(PLACE_OF_ONE)
        [pid] = await asyncio.to_thread(numbers, tmp_path / "pids", 1)
        (tmp_path / "logs" / "r" / "cycle_1" / "stacks_n0.txt").mkdir()
        await crew.stop(Cause(kind="hung"))
        assert not alive(pid)


PLACE_OF_ONE = Place(1, 7, 0, 1, 0, 1, 1, "127.0.0.1", 29_500)


def test_a_terminal_that_has_gone_away_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads what the agent says: it goes on."""
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        agent._say("cycle 2: node 0 of 1")
        agent._say("cycle 3: node 0 of 1")
    with contextlib.suppress(OSError):
        gone.close()


# ---- draining ------------------------------------------------------------------------------


class _NoAnswer:
    """Transactions take effect; the answer to the first comes when `late` is over, as none."""

    def __init__(self, under: Ledger, late: Any) -> None:
        self._under, self._late = under, late

    def __getattr__(self, name: str) -> object:
        return getattr(self._under, name)

    async def txn(self, *args: Any) -> object:
        done = await self._under.txn(*args)
        if self._late is not None:
            late, self._late = self._late, None
            await late()
            raise UnknownOutcome("no answer")
        return done


async def test_draining_at_once_costs_one_cycle_and_says_when(tmp_path: Path) -> None:
    """Also when the answer is lost, and the next cycle runs before anybody looks again."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    async with meeting(url, RULES) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")

        async def late() -> None:
            await here.until("cycle 2", lambda: len(here["n1"].crew.places) == 2)

        runtime = LiveRuntime(cast(Ledger, _NoAnswer(here.ledger, late)))
        cycle = (await here.look()).cycle
        await commands._next_cycle(runtime, Keys(RUN), cycle, Cause(kind="drained", node="n0"))
        view = await here.look()
        assert view.cycle.number == 2
        assert abs(view.cycle.history[-1].at - time.time()) < 60


# ---- bad calls, paths, secrets -------------------------------------------------------------


def resolved(*args: str) -> agent.Plan:
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
    plan = resolved("--ledger", "sqlite:///mine.db", "x.py")
    assert plan.settings.ledger_url == f"sqlite:///{home}/mine.db"
    found = resolved("--ledger", "sqlite:///a@b/mine.db", "x.py").settings.ledger_url
    assert found == f"sqlite:///{home}/a%40b/mine.db"
    (home / "ca.pem").write_text("")
    secret = "etcd://me:p%40ss,word@127.0.0.1:2379,127.0.0.2:2379?ca=ca.pem"
    found = resolved("--ledger", secret, "x.py").settings.ledger_url
    assert found == (f"etcd://me:p%40ss,word@127.0.0.1:2379,127.0.0.2:2379?ca={home}/ca.pem")


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
