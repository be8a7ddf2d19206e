"""The race that this part exists for, with real processes.

A trainer that deletes old weights by arithmetic takes them away from an inference server
that is slow to load them: FileNotFoundError, and the run is over. Here trainer and loaders
go on at speeds of their own, some are stopped, some are killed, and nobody ever misses a
file, reads a mixture, or fills the disk.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kids import Kid
from weights.children import model
from weights.family import go, house, start

LEASE_S = 1.5


class Plan(NamedTuple):
    """One loader: how long it takes to load, in steps of the trainer, and what it wants.

    `way` is how it reads: through the `pin`, or by paths, of the `stage` folder or of the
    version's `own` folder.
    """

    factor: float
    needs: str
    way: str


class Sampler(threading.Thread):
    """Measures the channel's folder from outside, again and again: each inode once.

    Files move while they are listed, so only what two listings in a row agree on counts.
    """

    def __init__(self, base: Path) -> None:
        super().__init__()
        self._base = base
        self._over = threading.Event()
        self.most_bytes = 0
        self.samples = 0

    def run(self) -> None:
        """Measure until told to stop."""
        before: dict[int, int] = {}
        while not self._over.wait(0.003):
            now = self._list()
            if now == before:
                self.most_bytes = max(self.most_bytes, sum(now.values()))
                self.samples += 1
            before = now

    def _list(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for folder, _, files in os.walk(self._base):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(f"{folder}/{name}")
                    found[status.st_ino] = status.st_size
        return found

    def __enter__(self) -> "Sampler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


async def _budget(folder: Path, versions: int) -> int:
    """A little less than what so many versions take: a budget that is kept to the byte."""
    folder.mkdir()
    async with house(folder) as home, home.publisher() as publisher:
        for number in (1, 2):
            await publisher.publish(number, model(number))
        return versions * sum(map(len, home.bytes_of(2).values())) - 50


async def _stop_for_long(sleeper: Kid, go_on: asyncio.Event) -> None:
    """Stop a loader in the middle of a load, for much longer than its lease."""
    await sleeper.ahear("loading", 30)
    sleeper.child.signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(go_on.wait(), 3 * LEASE_S)
    sleeper.child.signal(signal.SIGCONT)


def _check_loader(report: dict[str, Any], plan: Plan, steps: int, *, slept: bool) -> None:
    """It loaded what it asked for, in order, and nobody took anything from it."""
    loaded = report["loaded"]
    assert loaded == sorted(set(loaded)), report
    assert loaded[-1] == steps
    if not slept:
        assert report["lost"] == 0, report
        if plan.needs == "every":
            assert loaded == list(range(loaded[0], steps + 1)), report


async def _race(
    folder: Path, plans: dict[str, Plan], sleepers: dict[str, Plan], steps: int, step_s: float
) -> None:
    budget = await _budget(folder / "size", 5)
    async with house(folder) as home:
        with contextlib.ExitStack() as stack, Sampler(home.base) as sampler:
            loaders: dict[str, Kid] = {}
            for name, plan in {**plans, **sleepers, "victim": Plan(2, "every", "own")}.items():
                how = {"needs": plan.needs, "way": plan.way, "load_s": plan.factor * step_s}
                loader = home.start("loader", name=name, lease_s=LEASE_S, last=steps, **how)
                loaders[name] = stack.enter_context(loader)
            kept = {"keep_last": 1, "max_bytes": budget}
            started = home.start("trainer", steps=steps, step_s=step_s, retention=kept)
            trainer, victim = stack.enter_context(started), loaders["victim"]
            await go(*loaders.values(), trainer)
            trained = asyncio.Event()
            asleep = [
                asyncio.create_task(_stop_for_long(loaders[name], trained)) for name in sleepers
            ]
            await victim.ahear("loading", 30)
            victim.child.signal(signal.SIGKILL)
            slowest = max(plan.factor for plan in plans.values()) * step_s
            seconds = []
            for number in range(1, steps + 1):
                message = await trainer.ahear("published", LEASE_S + slowest + 10)
                assert message["number"] == number
                seconds.append(message["seconds"])
            await asyncio.gather(*asleep)
            for name, plan in {**plans, **sleepers}.items():
                report = await loaders[name].ahear("report", 60)
                print(report)
                _check_loader(report, plan, steps, slept=name in sleepers)
        print(f"most {sampler.most_bytes} of {budget} bytes in {sampler.samples} samples")
        print(f"longest publish {max(seconds):.2f} s")
        assert sampler.samples > 50
        assert sampler.most_bytes <= budget
        assert max(seconds) < LEASE_S + slowest + 3, "somebody dead or asleep held it up"
        async with home.publisher(keep_last=1):
            assert home.folders() == await home.committed() == [steps]
            assert home.leftovers() == []
        assert await home.read() == (steps, 0)


async def test_trainer_never_deletes_what_a_slow_loader_reads(tmp_path: Path) -> None:
    """Loaders slower than the trainer: no missing file, no mixture, no full disk, no stall.

    One loader is killed and one stopped for longer than its lease, both inside a load. The
    trainer waits for slow loaders that want every version, because the budget is small, but
    never for a dead one longer than its lease.
    """
    plans = {
        "half": Plan(0.5, "every", "pin"),
        "double": Plan(2, "every", "stage"),
        "five": Plan(5, "latest", "own"),
    }
    sleepers = {"sleeper": Plan(1, "every", "own")}
    await _race(tmp_path, plans, sleepers, steps=12, step_s=0.15)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["pin", "stage", "own"])
async def test_trainer_never_deletes_what_a_slow_loader_reads_for_long(
    tmp_path: Path, way: str
) -> None:
    """The same with every speed, both wishes, and a sleeper of each kind."""
    plans = {
        f"{needs}-{factor}": Plan(factor, needs, way)
        for needs in ("every", "latest")
        for factor in (0.5, 1, 2, 5)
    }
    sleepers = {f"sleeper-{needs}": Plan(1, needs, way) for needs in ("every", "latest")}
    await _race(tmp_path, plans, sleepers, steps=40, step_s=0.2)


@pytest.mark.long
async def test_the_race_is_lost_by_arithmetic(tmp_path: Path) -> None:
    """A trainer that deletes what is two steps old breaks a slow loader: the test can fail."""
    where = {"base": str(tmp_path / "policy"), "marker": str(tmp_path / "LOADED_STEP")}
    how: dict[str, Any] = {"load_s": 0.5, "last": 40, "stall_s": 0.0}
    with (
        start("naive_trainer", root=str(tmp_path), steps=40, step_s=0.1, folder=tmp_path) as one,
        start("watcher", folder=tmp_path, **where, **how) as two,
    ):
        began = time.monotonic()
        await go(one, two)
        report = await two.ahear("report", 30)
        assert report["error"].startswith("FileNotFoundError"), report
        print(f"lost after {time.monotonic() - began:.1f} s: {report['error']}")
