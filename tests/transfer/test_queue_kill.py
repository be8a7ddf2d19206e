"""Real producers, consumers and servers killed with -9 under load: nothing lost, nothing twice."""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import transfer
from holdfast.proc import Child, spawn
from holdfast.servers import RedisServer
from holdfast.transfer.queue.overview import overview

CHILD = Path(__file__).with_name("queue_child.py")
TASKS = ("train", "log")

Place = tuple[str, RedisServer | None]


@pytest.fixture(params=["shm", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store that outlives its users, and its server if it has one."""
    if request.param == "shm":
        yield f"{request.getfixturevalue('shm_url')}?budget=128M&segment=4M", None
        return
    with RedisServer(tmp_path / "redis") as server:
        yield f"redis://{server.host}:{server.port}", server


def storm(
    tmp_path: Path,
    place: Place,
    *,
    samples: int,
    kills: int,
    limit_s: float,
) -> None:
    """Two producers, three consumers; somebody is killed all the time; then all is counted."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    luck = random.Random(seed)
    store, server = place
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    how: dict[str, object] = {"store": store, "ledger": ledger, "seed": seed}
    how |= {"folder": str(tmp_path), "samples": samples}
    names = ["p0", "p1", "c0", "c1", "c2"]
    wanted = {f"{name}-{at}" for name in names[:2] for at in range(samples)}
    lives: Counter[str] = Counter()
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:

        def begin(name: str) -> None:
            """Start one, the first time or again."""
            lives[name] += 1
            role = "produce" if name.startswith("p") else "consume"
            told = json.dumps({**how, "name": name, "role": role, "life": lives[name]})
            log = tmp_path / f"out-{name}-{lives[name]}"
            child = spawn([sys.executable, str(CHILD), told], name=log.name, log=log)
            children[name] = stack.enter_context(child)

        for name in names:
            begin(name)
        for _ in range(kills):
            time.sleep(luck.uniform(0.3, 1.0))
            if server is not None and luck.random() < 0.25:
                server.kill()
                server.restart()
                continue
            name = luck.choice(names)
            if children[name].alive():
                children[name].kill_group()
                begin(name)
        deadline = time.monotonic() + limit_s
        while True:
            for name in names[:2]:
                code = None if children[name].alive() else children[name].wait(1)
                if code not in (None, 0):
                    begin(name)
            found = asyncio.run(overview(ledger, "default", "q"))
            if found is not None and found.ever == len(wanted) and found.samples == 0:
                break
            assert time.monotonic() < deadline, f"seed {seed}: {found}"
            time.sleep(0.2)
    told: Counter[tuple[str, str]] = Counter()
    for log in tmp_path.glob("acked-*"):
        for line in log.read_text().splitlines():
            task, key = line.split()
            told[task, key] += 1
    assert max(told.values()) == 1, f"seed {seed}: {told.most_common(3)}"
    assert {key for _, key in told} <= wanted
    # An acknowledgement whose child was killed before it could tell is the only gap.
    assert len(told) >= len(wanted) * len(TASKS) * 0.5
    for out in tmp_path.glob("out-*"):
        assert "WRONG VALUE" not in out.read_text(), f"seed {seed}: {out.read_text()}"
    with transfer.connect(store) as opened:
        assert opened.stat().keys == 0, f"seed {seed}"


def test_a_short_storm(tmp_path: Path, place: Place) -> None:
    storm(tmp_path, place, samples=150, kills=5, limit_s=60)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(5))
def test_a_long_storm(tmp_path: Path, place: Place, turn: int) -> None:
    print(f"turn {turn}")
    storm(tmp_path, place, samples=2000, kills=60, limit_s=300)
