"""Hosts with a network of their own, one of which is cut off and comes back. Long; needs root.

Each host is a network namespace on a bridge, with etcd at the bridge's own address. Names and
addresses are of this test run alone, and are removed however it ends.
"""

import ipaddress
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from holdfast import ledger
from holdfast.proc import HeldPort
from holdfast.rendezvous.records import Keys
from holdfast.servers import EtcdServer
from kids import alive
from rendezvous.torchrun.cluster import Cluster as TorchrunCluster

from .cluster import SCRIPT, Cluster, Commits, there

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

LEASE_S = 5.0
FLAGS = ["--spares", "1", "--lease", str(LEASE_S), "--last-call", "60", "--max-restarts", "20"]


def require() -> None:
    """Skip, or fail in CI, where nobody may make network namespaces."""
    missing = pytest.fail if os.environ.get("CI") else pytest.skip
    if os.geteuid() != 0:
        missing("only root may make network namespaces")
    for program in ("ip", "bridge"):
        if shutil.which(program) is None:
            missing(f"the program {program} was not found: install Debian's iproute2")


def ip(*args: str, check: bool = True) -> str:
    """Run `ip`, of iproute2."""
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
    return done.stdout


class Hosts:
    """Hosts 1 to n on one bridge, which has the address `bridge`."""

    def __init__(self, count: int) -> None:
        self._mark = f"hf{random.SystemRandom().randrange(16**6):06x}"
        self._net = self._free_net()
        self._count = count
        self.bridge = str(self._net[-2])

    def __enter__(self) -> Self:
        try:
            ip("link", "add", self._mark, "type", "bridge")
            ip("addr", "add", f"{self.bridge}/{self._net.prefixlen}", "dev", self._mark)
            ip("link", "set", self._mark, "up")
            for number in range(1, self._count + 1):
                self._add(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(1, self._count + 1):
            ip("netns", "del", self._space(number), check=False)
            ip("link", "del", self._cable(number), check=False)
        ip("link", "del", self._mark, check=False)

    def address(self, number: int) -> str:
        """Where a host is reached."""
        return str(self._net[number])

    def prefix(self, number: int) -> Sequence[str]:
        """What makes a command run on a host."""
        return ("ip", "netns", "exec", self._space(number))

    def cut(self, number: int) -> None:
        """Pull a host's cable."""
        ip("link", "set", self._cable(number), "down")

    def heal(self, number: int) -> None:
        """Plug it in again."""
        ip("link", "set", self._cable(number), "up")

    def _space(self, number: int) -> str:
        return f"{self._mark}-{number}"

    def _cable(self, number: int) -> str:
        return f"{self._mark}v{number}"

    def _add(self, number: int) -> None:
        space, cable = self._space(number), self._cable(number)
        ip("netns", "add", space)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", cable, "master", self._mark)
        ip("link", "set", cable, "up")
        place = f"{self.address(number)}/{self._net.prefixlen}"
        ip("-n", space, "addr", "add", place, "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")

    @staticmethod
    def _free_net() -> ipaddress.IPv4Network:
        """A network that this machine has no way to, except to everywhere."""
        used = [
            ipaddress.ip_network(line.split()[0])
            for line in ip("-4", "route", "show").splitlines()
            if line[0].isdigit()
        ]
        while True:
            one, two = (random.SystemRandom().randrange(256) for _ in range(2))
            net = ipaddress.IPv4Network(f"10.{one}.{two}.0/24")
            if not any(net.overlaps(other) for other in used):
                return net


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require()
    with Hosts(3) as three:
        yield three


@pytest.fixture
def url(tmp_path: Path, hosts: Hosts) -> Iterator[str]:
    """An etcd that the hosts reach over the bridge."""
    with HeldPort("0.0.0.0") as port, HeldPort() as peer:
        urls = [f"http://{host}:{port}" for host in ("127.0.0.1", hosts.bridge)]
        args = ["--listen-client-urls", ",".join(urls), "--advertise-client-urls", urls[1]]
        with EtcdServer(tmp_path / "etcd", ports=(port, peer), args=args):
            yield f"etcd://{hosts.bridge}:{port}"


class Moments:
    """When a process had ended and a key was gone, seen by a thread that does nothing else."""

    def __init__(self, url: str, pid: int, key: str) -> None:
        self.at: dict[str, float] = {}
        self._url, self._pid, self._key = url, pid, key
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        limit = time.monotonic() + 60
        with ledger.open_sync(self._url) as opened:
            while time.monotonic() < limit and len(self.at) < 2:
                if not alive(self._pid):
                    self.at.setdefault("worker", time.monotonic())
                if opened.get(self._key) is None:
                    self.at.setdefault("lease", time.monotonic())
                time.sleep(0.01)

    def all(self) -> dict[str, float]:
        """Wait for both."""
        self._thread.join()
        return self.at


def start(here: Cluster, hosts: Hosts, number: int, *program: str, address: str = "") -> None:
    """Start a node on its host, at the host's own address unless another is given."""
    here.start(
        f"n{number}",
        *program,
        prefix=hosts.prefix(number + 1),
        flags=["--local-addr", address or hosts.address(number + 1)],
        env={"GLOO_SOCKET_IFNAME": "eth0"},
    )


def test_a_host_that_is_cut_off_and_comes_back(tmp_path: Path, hosts: Hosts, url: str) -> None:
    """Its workers are stopped before its lease ends; the spare trains on; then it is the spare."""
    with Cluster(tmp_path, url, nnodes="2:3", flags=FLAGS) as here:
        commits = Commits(url)
        for number in (0, 1, 2):
            start(here, hosts, number, SCRIPT, "100000", "0.1", str(tmp_path / "enough"))
        here.until_step(2)
        first = {"n0": "active", "n1": "active", "n2": "spare"}
        here.until("two and a spare", lambda: here.states() == first)
        moments = Moments(url, here.workers("n0")[0], Keys("r").node("n0"))

        cut_at, step = time.monotonic(), here.step()
        hosts.cut(1)
        here.until("progress with the spare", lambda: here.step() >= step + 5, 120)
        again_at = time.monotonic()
        at = moments.all()
        told = {what: round(moment - cut_at, 2) for what, moment in at.items()}
        print(f"after the cut: {told}, five steps further {again_at - cut_at:.2f} s")
        assert at["worker"] < at["lease"], told
        assert here.members() == ["n2", "n1"], "the spare has its rank"
        assert here.agents["n0"].alive()

        hosts.heal(1)
        here.until("n0 as a spare", lambda: here.states().get("n0") == "spare", 60)
        step = here.step()
        here.until("progress after the return", lambda: here.step() >= step + 5)
        assert here.cycle().number == 2, "its return ended a cycle"

        below = here.below()
        (tmp_path / "enough").touch()
        assert here.codes("n0", "n1", "n2", timeout_s=60) == [0, 0, 0]
        here.trained()
        assert not there(below)
        commits.close()


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_0_that_nobody_reaches_loses_its_rank_and_is_told_why(
    tmp_path: Path, hosts: Hosts, url: str, count: int
) -> None:
    """To the spare, if there is one, else to the other member; the run ends with 0 on all."""
    flags = [*FLAGS[2:], "--spares", str(count - 2), "--max-restarts", "0"]
    with Cluster(tmp_path, url, nnodes=f"2:{count}", flags=flags) as here:
        names = [f"n{number}" for number in range(count)]
        start(here, hosts, 0, SCRIPT, "5", "0.1", address="127.0.0.1")
        for number in range(1, count):
            start(here, hosts, number, SCRIPT, "5", "0.1")
        assert here.codes(*names, timeout_s=120) == [0] * count, here.story()
        said = here.said("n0")
        assert "1 of 1 other nodes do not reach it at 127.0.0.1: n1" in said
        assert "n0 is not reached at 127.0.0.1" in here.said("n1")
        assert "has succeeded after 2 cycles" in said
        assert here.members() == (["n2", "n1"] if count == 3 else ["n1", "n0"])


def test_a_rank_0_that_nobody_reaches_under_torchrun(
    tmp_path: Path, hosts: Hosts, url: str
) -> None:
    """As under `holdfast launch`: the spare takes its rank, and all three exit with 0."""
    with TorchrunCluster(tmp_path, url, nnodes="2:3") as here:
        for number in range(3):
            address = hosts.address(number + 1) if number else "127.0.0.1"
            here.start(
                *(SCRIPT, "5", "0.1"),
                conf=f"last_call_timeout=60,spares=1,node_name=n{number},infra_rank={number}",
                prefix=hosts.prefix(number + 1),
                flags=["--local-addr", address],
                env={"GLOO_SOCKET_IFNAME": "eth0"},
            )
        assert here.codes("n0", "n1", "n2", timeout_s=180) == [0, 0, 0], here.story()
        cycle = here.cycle()
        assert [member.name for member in cycle.members] == ["n2", "n1"]
        assert [cause.kind for cause in cycle.history] == ["unreachable"]
        assert "this node comes after all spares" in here.said("n0")
