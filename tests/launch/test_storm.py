"""Four active nodes, two spares, and everything that can happen to them. Long."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.proxy import ProxyThread
from holdfast.servers import EtcdCluster

from .cluster import SCRIPT, Agent, Cluster, Commits, descendants

LEASE_S = 3.0
FLAGS = ["--spares", "2", "--lease", str(LEASE_S), "--last-call", "60", "--max-restarts", "100"]
NAMES = [f"n{number}" for number in range(6)]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Storm:
    """A cluster that trains, and a hand that breaks it; each blow is seen to be survived."""

    def __init__(self, here: Cluster, luck: random.Random) -> None:
        self.here, self.luck = here, luck
        self.stopped: list[int] = []

    def active(self) -> list[str]:
        """The nodes that hold ranks, by rank."""
        return [member[0] for member in self.here.status()["cycle"]["members"]]

    def spares(self) -> list[str]:
        """Living nodes without a rank."""
        idle = ("spare", "parked")
        return [n["name"] for n in self.here.status()["nodes"] if n["state"] in idle]

    def worker(self, name: str) -> int:
        """A worker's pid."""
        return next(iter(self.here.workers(name).values()))

    def kill_agent(self, name: str) -> int:
        """Kill a node's agent; returns its pid."""
        self.here.agents[name].child.process.kill()
        return self.here.agents[name].pid

    def back(self, name: str) -> Agent:
        """A node is started again, under its old name."""
        return self.here.start(name, SCRIPT, *self.here.program)

    def goes_on(self, blow: str) -> None:
        """Training is three steps further than it was, in a cycle with all four nodes."""
        target = self.here.step() + 3
        self.here.until(f"progress after: {blow}", lambda: self.here.step() >= target, 120)

    def blow(self, what: str, strike: Callable[[], object]) -> None:
        print(f"{what} at step {self.here.step()}")
        strike()
        self.goes_on(what)

    def all_there(self) -> None:
        """Four work, two wait."""
        self.here.until("four and two", lambda: len(self.spares()) == 2, 90)


def _stop(storm: Storm, pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def _play(storm: Storm) -> None:
    here = storm.here
    storm.blow("kill a worker", lambda: os.kill(storm.worker(storm.active()[2]), 9))
    storm.blow("kill rank 0's worker", lambda: os.kill(storm.worker(storm.active()[0]), 9))
    victim = storm.active()[3]
    storm.blow("kill an agent", lambda: storm.kill_agent(victim))
    storm.back(victim)
    storm.all_there()
    first = storm.active()[0]
    storm.blow("kill rank 0's agent", lambda: storm.kill_agent(first))
    storm.back(first)
    storm.all_there()
    spare = storm.spares()[0]
    cycle = here.status()["cycle"]["number"]
    storm.blow("kill a spare", lambda: storm.kill_agent(spare))
    assert here.status()["cycle"]["number"] == cycle, "a spare's death ended a cycle"
    storm.back(spare)
    storm.all_there()
    one, two = storm.active()[1], storm.active()[2]
    storm.blow("kill two agents", lambda: [storm.kill_agent(name) for name in (one, two)])
    storm.back(one)
    storm.back(two)
    storm.all_there()
    asleep = storm.active()[1]
    workers = list(here.workers(asleep).values())
    storm.blow(
        "stop an agent for longer than its lease",
        lambda: _stop(storm, [here.agents[asleep].pid], 2.5 * LEASE_S),
    )
    assert not [pid for pid in workers if Path(f"/proc/{pid}/exe").exists()], "workers live on"
    storm.all_there()
    asleep = storm.active()[2]
    agent = here.agents[asleep].pid
    storm.blow(
        "stop a whole node for longer than its lease",
        lambda: _stop(storm, [*descendants(agent), agent], 2.5 * LEASE_S),
    )
    storm.all_there()


def _end(storm: Storm, commits: Commits) -> None:
    """Everybody exits 0, nothing is left, and the result is right."""
    here = storm.here
    living = [agent for agent in here.all if agent.child.alive()]
    below = [pid for agent in living for pid in descendants(agent.pid)]
    assert [agent.code(200) for agent in living] == [0] * 6, here.story()
    steps = here.committed("step")
    assert here.committed("total") == steps * (steps + 1) // 2
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    commits.close()


def test_storm_on_sqlite(tmp_path: Path) -> None:
    """Everything in turn; nobody commits under another's rank; the end is right."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Cluster(tmp_path, url, nnodes="4:6", flags=FLAGS) as here:
        commits = Commits(url, "r")
        here.program = ("100000", "0.1", str(tmp_path / "enough"))
        for name in NAMES:
            here.start(name, SCRIPT, *here.program)
        storm = Storm(here, random.Random(0))
        here.until("step 2", lambda: here.step() >= 2, 240)
        storm.all_there()
        _play(storm)
        (tmp_path / "enough").touch()
        _end(storm, commits)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(3, tmp_path / "etcd") as cluster:
        yield cluster


def _url(endpoints: list[tuple[str, int]]) -> str:
    return "etcd://" + ",".join(f"{host}:{port}" for host, port in endpoints)


def test_storm_on_etcd_with_a_cut_node_and_a_dead_member(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    """Three members of etcd, one of which dies; a node that is cut off stops its workers."""
    url = _url(etcd.endpoints)
    with (
        Cluster(tmp_path, url, nnodes="4:6", flags=FLAGS) as here,
        _Proxies(etcd) as proxies,
    ):
        commits = Commits(url, "r")
        here.program = ("100000", "0.1", str(tmp_path / "enough"))
        for name in NAMES:
            own = proxies.url if name == "n1" else None
            here.start(name, SCRIPT, *here.program, url=own)
        storm = Storm(here, random.Random(0))
        here.until("step 2", lambda: here.step() >= 2, 240)
        storm.all_there()
        assert "n1" in storm.active()
        workers = list(here.workers("n1").values())
        storm.blow("cut a node off from the ledger", lambda: proxies.cut())
        here.until(
            "its workers stopped",
            lambda: not [pid for pid in workers if Path(f"/proc/{pid}/exe").exists()],
        )
        proxies.heal()
        storm.all_there()
        storm.blow("kill a member of etcd", etcd.members[0].kill)
        storm.blow("kill a worker", lambda: os.kill(storm.worker(storm.active()[1]), 9))
        victim = storm.active()[0]
        storm.blow("kill rank 0's agent", lambda: storm.kill_agent(victim))
        storm.back(victim)
        storm.all_there()
        etcd.members[0].restart()
        (tmp_path / "enough").touch()
        _end(storm, commits)


class _Proxies:
    """One node's own way to every member of etcd, that can be cut."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self._proxies = [ProxyThread(host, port) for host, port in etcd.endpoints]

    def __enter__(self) -> "_Proxies":
        for proxy in self._proxies:
            proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            proxy.__exit__(None, None, None)

    @property
    def url(self) -> str:
        return _url([proxy.address for proxy in self._proxies])

    def _all(self, action: Callable[[Any], object]) -> None:
        for proxy in self._proxies:
            proxy.do(action)

    def cut(self) -> None:
        self._all(lambda proxy: proxy.cut("blackhole"))

    def heal(self) -> None:
        self._all(lambda proxy: proxy.heal())
