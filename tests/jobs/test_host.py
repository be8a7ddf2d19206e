"""Hosts with real trainer processes: taken, served, killed, replaced, given back."""

import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from holdfast import ledger, proc
from holdfast.jobs import decide
from holdfast.jobs.host_process import HostSettings, _is_dead, _me
from holdfast.jobs.launcher import Ticket
from holdfast.jobs.local import LocalLauncher, log_file
from holdfast.jobs.records import Host as HostRecord
from holdfast.jobs.serving import SETTINGS
from holdfast.jobs.store import Jobs
from holdfast.ledger import Delete, LiveRuntime
from holdfast.proc import child as child_module
from holdfast.servers import EtcdServer
from holdfast.timeouts import Timeouts
from jobs.hosts import (
    BUDGET,
    TOY,
    host,
    is_running,
    left_running,
    trainers,
    until,
    until_next,
    until_state,
)
from patience import HANG_S, auntil


async def test_from_created_to_running_to_killed_to_running(jobs: Jobs, tmp_path: Path) -> None:
    """A trainer that dies is replaced, under the next epoch; each epoch has its own log."""
    await jobs.create("a", "j", {})
    async with host(tmp_path):
        first = await until(jobs, is_running)
        os.kill(trainers()[0].pid, signal.SIGKILL)
        second = await until_next(jobs, first)
        assert second.job.epoch == first.job.epoch + 1
        assert len(trainers()) == 1
    assert trainers() == [], "a host takes its trainers with it"
    left = await until_state(jobs, "PENDING")
    assert left.alive is None
    assert len(left.job.restarts) == 1, "that a host leaves is not the job's fault"
    logs = {path.name: path.read_text() for path in (tmp_path / "logs/a/j").iterdir()}
    assert logs.keys() == {"epoch-1.log", "epoch-2.log"}
    assert "epoch 2" in logs["epoch-2.log"]


async def test_pause_resume_delete(jobs: Jobs, tmp_path: Path) -> None:
    await jobs.create("a", "j", {})
    async with host(tmp_path):
        await until(jobs, is_running)
        await jobs.change("a", "j", "pause")
        paused = await until(jobs, lambda it: it.alive is None)
        assert paused.job.state == "PAUSED"
        assert trainers() == []
        await jobs.change("a", "j", "resume")
        await until(jobs, is_running)
        assert (await jobs.change("a", "j", "delete")).state == "DELETING"
        await until_state(jobs, "DELETED")
        assert trainers() == []


async def test_a_trainer_that_cannot_work_ends_its_job(jobs: Jobs, tmp_path: Path) -> None:
    """A crash loop ends, with the exit code; what can never be started fails at once."""
    await jobs.create("a", "j", {"how": "exit"})
    await jobs.create("a", "unknown", {"holdfast": {"trainer": "nobody"}})
    await jobs.create("a", "forbidden", {"holdfast": {"command": ["true"]}})
    await jobs.create("a", "finished", {"how": "done"})
    async with host(tmp_path):
        failed = await until_state(jobs, "FAILED")
        assert "code 7" in failed.job.reason
        assert len(failed.job.restarts) == BUDGET.restarts + 1
        unknown = await until_state(jobs, "FAILED", "unknown")
        assert "--trainer" in unknown.job.reason
        forbidden = await until_state(jobs, "FAILED", "forbidden")
        assert "--allow-commands" in forbidden.job.reason
        assert unknown.job.restarts == forbidden.job.restarts == ()
        await until_state(jobs, "COMPLETED", "finished")


async def test_a_trainer_that_never_answers(jobs: Jobs, tmp_path: Path) -> None:
    await jobs.create("a", "j", {"how": "silent"})
    async with host(tmp_path, start_s=0.3):
        failed = await until_state(jobs, "FAILED")
        assert "did not answer at /api/v1/healthz" in failed.job.reason
    assert trainers() == []


async def test_of_two_hosts_one_takes_a_job_and_the_other_takes_over(
    jobs: Jobs, tmp_path: Path
) -> None:
    for number in range(4):
        await jobs.create("a", f"j{number}", {})
    async with contextlib.AsyncExitStack() as others:
        await others.enter_async_context(host(tmp_path, "h2"))
        async with host(tmp_path, "h1"):
            for number in range(4):
                await until(jobs, is_running, f"j{number}")
            assert len(trainers()) == 4
        for number in range(4):
            await until(jobs, lambda it: is_running(it) and it.job.host == "h2", f"j{number}")
        assert len(trainers()) == 4


async def test_a_host_that_loses_its_lease_keeps_what_is_still_its_own(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The ledger was away for longer than a lease: trainers go on, under another lease."""
    await jobs.create("a", "j", {})
    async with host(tmp_path):
        first = await until(jobs, is_running)
        pids = [one.pid for one in trainers()]
        assert first.alive_entry is not None
        lease = first.alive_entry.lease
        await jobs.runtime.ledger.revoke(lease)
        second = await until(
            jobs, lambda it: it.alive_entry is not None and it.alive_entry.lease != lease
        )
        assert (second.job.state, second.job.epoch) == ("RUNNING", first.job.epoch)
        assert [one.pid for one in trainers()] == pids


async def test_a_host_that_loses_its_lease_stops_what_others_have_taken(
    jobs: Jobs, tmp_path: Path
) -> None:
    await jobs.create("a", "j", {})
    async with host(tmp_path):
        first = await until(jobs, is_running)
        assert first.alive_entry is not None
        keys = jobs.keys
        taken = decide.fall(first.job, first.job.epoch, "lost", jobs.wall(), BUDGET)
        # In one moment: the lease's end, and another host's conclusion.
        await jobs.commit(first, taken, ops=[Delete(keys.alive("a", "j"))])
        second = await until_next(jobs, first)
        await auntil(lambda: len(trainers()) == 1)
        assert second.job.address != first.job.address


async def test_a_host_adrift_stops_everything(tmp_path: Path) -> None:
    """Without a ledger for long its trainers hold machines for nothing."""
    with EtcdServer(tmp_path / "etcd") as etcd:
        url = "etcd://{}:{}".format(*etcd.endpoint)
        async with (
            host(tmp_path, url=f"{url}?timeout=1", host_adrift_s=2.0),
            ledger.open(url) as opened,
        ):
            jobs = Jobs(LiveRuntime(opened), "r", time.time)
            await jobs.create("a", "j", {})
            first = await until(jobs, is_running)
            etcd.pause()
            try:
                await auntil(lambda: not trainers())
            finally:
                etcd.resume()
            await until_next(jobs, first)
    assert trainers() == []


async def test_a_host_that_died_silently_is_noticed_within_its_lease(
    jobs: Jobs, tmp_path: Path
) -> None:
    """RUNNING is kept alive by a lease: what its host left behind is taken over by another."""
    await jobs.create("a", "j", {})
    found, _ = await left_running(jobs, 2.0)
    began = time.monotonic()
    async with host(tmp_path):
        again = await until(jobs, lambda it: is_running(it) and it.job.host == "h1")
    assert again.job.epoch == found.job.epoch + 1
    assert time.monotonic() - began > 1.0


def test_the_command_of_a_trainer_is_found(tmp_path: Path) -> None:
    """The operator's, word by word, or the job's own where that is allowed."""
    launcher = LocalLauncher(
        {"default": "python 'a b' {port}"}, tmp_path, "memory:", allow_commands=True
    )
    assert launcher.command({}) == ["python", "a b", "{port}"]
    assert launcher.command({"holdfast": {"command": ["x", "{port}"]}}) == ["x", "{port}"]


async def test_what_trainers_write_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one runs, and over its epochs: of a job that is started again and again the newest
    logs are kept."""
    monkeypatch.setattr(child_module, "LOG_BYTES", 128 << 10)
    monkeypatch.setattr("holdfast.jobs.local.DEFAULTS", Timeouts(log_trim_s=0.02))
    code = "import time\nfor _ in range(60_000): print('x' * 31)\ntime.sleep(600)"
    command = shlex.join([sys.executable, "-u", "-c", code])
    launcher = LocalLauncher({"default": command}, tmp_path, "memory:")
    old, log = (log_file(tmp_path, "a", "j", epoch) for epoch in (1, 33))
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    log.with_name("epoch-2.log").write_bytes(b"old")
    running = await launcher.start(Ticket(run="r", account="a", job="j", epoch=33, spec={}))
    await auntil(lambda: log.stat().st_size >= 60_000 * 32)
    await auntil(lambda: log.stat().st_blocks * 512 <= 128 << 10)
    await running.stop(0.0)
    assert not old.exists()
    assert log.with_name("epoch-2.log").exists()


def host_process(tmp_path: Path) -> proc.Child:
    """A host as `holdfast serve` starts it, with a lease that lasts longer than any test."""
    settings = HostSettings(
        run="r",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        name="h1",
        folder=str(tmp_path),
        trainers={"default": TOY},
        lease_s=600.0,
    )
    times = tmp_path / "times.toml"
    times.write_text("[timeouts]\nhost_adrift_s = 700.0\n")
    env = {SETTINGS: msgspec.json.encode(settings).decode(), "HOLDFAST_TIMEOUTS": str(times)}
    argv = [sys.executable, "-m", "holdfast.jobs.host_process"]
    return proc.spawn(argv, env=env, log=tmp_path / "host.log")


async def test_a_host_that_was_killed_does_not_wait_for_its_old_lease(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Started again, it sees that its earlier life is over, and begins the next incarnation."""
    await jobs.create("a", "j", {})
    with host_process(tmp_path) as first:
        before = await until(jobs, is_running)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(HANG_S)
        with host_process(tmp_path):
            after = await until_next(jobs, before)
    assert after.job.epoch == before.job.epoch + 1


async def test_the_lease_of_a_host_that_may_live_is_left_alone(jobs: Jobs, tmp_path: Path) -> None:
    """A pid says nothing on another machine, and a living process is no earlier life of ours."""
    mine = _me("h1")
    assert not _is_dead(mine)
    assert _is_dead(msgspec.structs.replace(mine, began=mine.began + 1)), (
        "a pid that is used again"
    )
    assert not _is_dead(msgspec.structs.replace(mine, began=1, place="elsewhere"))
    assert not _is_dead(HostRecord(name="h1")), "one of an older release"
    async with host(tmp_path, host_lease_s=60.0), host(tmp_path, host_lease_s=60.0):
        await jobs.create("a", "j", {})
        found = await until(jobs, is_running)
        assert found.job.epoch == 1
