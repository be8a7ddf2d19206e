"""Four active nodes, two spares, and everything that can happen to them. Long."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import proc
from holdfast.chaos.proxy import ProxyThread
from holdfast.servers import EtcdCluster
from kids import alive

from .cluster import SCRIPT, Cluster, Commits, descendants, there

LEASE_S = 3.0
FLAGS = ["--spares", "2", "--lease", str(LEASE_S), "--last-call", "60", "--max-restarts", "100"]
IDLE = ("spare", "parked")
NAMES = [f"n{number}" for number in range(6)]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Storm:
    """A cluster that trains, and a hand that breaks it; each blow is seen to be survived."""

    def __init__(self, here: Cluster) -> None:
        self.here = here

    def spares(self) -> list[str]:
        """Living nodes without a rank."""
        return [name for name, state in self.here.states().items() if state in IDLE]

    def worker(self, name: str) -> int:
        """A worker's pid."""
        return next(iter(self.here.workers(name).values()))

    def kill(self, blow: str, *names: str) -> None:
        """Kill agents, see that training goes on, and start them again under their names."""
        agents = [self.here.agents[name] for name in names]
        self.blow(blow, lambda: _signal(signal.SIGKILL, agents))
        for name in names:
            self.start(name)
        self.all_there()

    def start(self, name: str, url: str | None = None) -> None:
        """A node comes; `url`: its own way to the ledger."""
        enough = str(self.here.folder / "enough")
        self.here.start(name, SCRIPT, "100000", "0.1", enough, url=url)

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


def _signal(number: int, agents: list[proc.Child]) -> None:
    for agent in agents:
        agent.signal_alone(number)


def _stop(pids: list[int]) -> None:
    """Stop processes for longer than their lease lasts."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5 * LEASE_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _play(storm: Storm) -> None:
    here = storm.here
    storm.blow("kill a worker", lambda: os.kill(storm.worker(here.members()[2]), 9))
    storm.blow("kill rank 0's worker", lambda: os.kill(storm.worker(here.members()[0]), 9))
    storm.kill("kill an agent", here.members()[3])
    storm.kill("kill rank 0's agent", here.members()[0])
    cycle = here.cycle().number
    storm.kill("kill a spare", storm.spares()[0])
    assert here.cycle().number == cycle, "a spare's death ended a cycle"
    storm.kill("kill two agents", *here.members()[1:3])
    asleep = here.members()[1]
    workers = list(here.workers(asleep).values())
    agent = here.agents[asleep].pid
    storm.blow("stop an agent", lambda: _stop([agent]))
    assert not any(map(alive, workers)), "workers live on"
    storm.all_there()
    node = here.agents[here.members()[2]].pid
    storm.blow("stop a whole node", lambda: _stop([*descendants(node), node]))
    storm.all_there()


@contextlib.contextmanager
def storm_on(folder: Path, url: str, n1_url: str | None = None) -> Iterator[Storm]:
    """Six nodes that train; in the end everybody exits 0, nothing is left, the result is right.

    `n1_url`: the way of n1 to the ledger.
    """
    with Cluster(folder, url, nnodes="4:6", flags=FLAGS) as here:
        commits, storm = Commits(url), Storm(here)
        for name in NAMES:
            storm.start(name, n1_url if name == "n1" else None)
        here.until_step(2)
        storm.all_there()
        yield storm
        (folder / "enough").touch()
        below = here.below()
        living = [name for name, agent in here.agents.items() if agent.alive()]
        assert here.codes(*living, timeout_s=200) == [0] * 6, here.story()
        here.trained()
        assert not there(below)
        commits.close()


def test_storm_on_sqlite(tmp_path: Path) -> None:
    """Everything in turn; nobody commits under another's rank; the end is right."""
    with storm_on(tmp_path, f"sqlite:///{tmp_path}/ledger.db") as storm:
        _play(storm)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(3, tmp_path / "etcd") as cluster:
        yield cluster


def _cut(proxy: Any) -> None:
    proxy.cut("blackhole")


def _url(endpoints: list[tuple[str, int]]) -> str:
    return "etcd://" + ",".join(f"{host}:{port}" for host, port in endpoints)


def test_storm_on_etcd_with_a_cut_node_and_a_dead_member(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    """Three members of etcd, one of which dies; a node that is cut off stops its workers."""
    url = _url(etcd.endpoints)
    with contextlib.ExitStack() as stack:
        ways = [ProxyThread(host, port) for host, port in etcd.endpoints]
        for way in ways:
            stack.enter_context(way)
        n1_url = _url([way.address for way in ways])
        storm = stack.enter_context(storm_on(tmp_path, url, n1_url))
        here = storm.here
        assert "n1" in here.members()
        workers = list(here.workers("n1").values())
        storm.blow("cut a node off from the ledger", lambda: [way.do(_cut) for way in ways])
        here.until("its workers stopped", lambda: not any(map(alive, workers)))
        for way in ways:
            way.do(lambda proxy: proxy.heal())
        storm.all_there()
        storm.blow("kill a member of etcd", etcd.members[0].kill)
        storm.blow("kill a worker", lambda: os.kill(storm.worker(here.members()[1]), 9))
        storm.kill("kill rank 0's agent", here.members()[0])
        etcd.members[0].restart()
