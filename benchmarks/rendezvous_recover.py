"""Kill a worker, kill a node, end with a spare: the same for every launcher, as its users run it.

Two active nodes and a spare, two workers each, gloo on loopback, one torch thread. A session
goes through all three, and each is measured from the outside: workers tell what happens to them
in files (`rendezvous_work.py`), agents are watched for their ends.
"""

import abc
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import proc
from holdfast.errors import TimedOut

WORK = Path(__file__).with_name("rendezvous_work.py")
NODES, SLOTS = 2, 2
START_S = 90.0
SETTLE_S = 3.0
JOIN_S = 5.0
"""How long a spare has to get from its start to its waiting."""
WARM_S = 120.0
_LOOK_S = 0.005

_MARK = "HOLDFAST_BENCH"
# Waits for the end of its standard input, then kills whoever has the mark in its environment.
_REAPER = """\
import os, signal, sys
mark = sys.argv[1].encode()
sys.stdin.read()
found = True
while found:
    found = False
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark not in file.read().split(b"\\0"):
                    continue
            os.kill(int(pid), signal.SIGKILL)
            found = True
        except OSError:
            pass
"""

Line = dict[str, Any]


class Recovery(NamedTuple):
    """Seconds since the kill, until the last of the new workers has got so far."""

    began: float
    group: float
    reduced: float


class Ending(NamedTuple):
    """From the last worker's last line to the end of the last agent."""

    took: float
    codes: tuple[int | None, ...]


class Session(NamedTuple):
    """What one session has shown; None: not within the limit."""

    worker: Recovery | None = None
    node: Recovery | None = None
    ending: Ending | None = None
    trouble: str = ""


class Launcher(abc.ABC):
    """How a node's agent is started."""

    name = ""
    lease_s = 0.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abc.abstractmethod
    def argv(self, number: int) -> list[str]:
        """The command of node `number`; 0 hosts what must be hosted."""

    def env(self) -> dict[str, str]:
        """What its environment adds."""
        return {}

    def settle(self, agents: Sequence[proc.Child]) -> None:
        """Wait until it is as it would be in the middle of a long run."""
        del agents
        time.sleep(SETTLE_S)


class Holdfast(Launcher):
    """`holdfast launch`, on sqlite."""

    name = "holdfast launch"
    lease_s = 5.0

    def argv(self, number: int) -> list[str]:
        """The same on every node."""
        argv = [sys.executable, "-m", "holdfast", "launch", "--run", "bench"]
        argv += ["--ledger", f"sqlite:///{self.folder}/ledger.db"]
        argv += ["--nnodes", f"{NODES}:{NODES + 1}", "--spares", "1"]
        argv += ["--nproc-per-node", str(SLOTS), "--node-name", f"n{number}"]
        argv += ["--local-addr", "127.0.0.1", "--infra-rank", str(number)]
        argv += ["--lease", str(self.lease_s), "--log-dir", str(self.folder / "logs")]
        return [*argv, str(self.folder / WORK.name), str(self.folder)]

    def settle(self, agents: Sequence[proc.Child]) -> None:
        """Until every slot of every node has its next interpreter ready."""
        deadline = time.monotonic() + WARM_S
        while any(self._ready(number) < SLOTS for number in range(len(agents))):
            if time.monotonic() > deadline:
                return  # a busy machine: what starts cold is counted
            time.sleep(0.1)
        time.sleep(0.5)

    def _ready(self, number: int) -> int:
        """How many interpreters wait, by the events of a node's last life."""
        waiting: set[int] = set()
        path = self.folder / "logs" / "bench" / "events" / f"n{number}.jsonl"
        life = 0
        for line in path.read_text().splitlines() if path.exists() else ():
            event = json.loads(line)
            if event["pid"] != life:
                life, waiting = event["pid"], set()
            if event["type"] == "launch.warm.ready":
                waiting.add(event["child_pid"])
            elif event["type"] == "launch.warm.lost":
                waiting.discard(event["child_pid"])
            elif event["type"] == "launch.worker.started":
                waiting.discard(event["worker_pid"])
        return len(waiting)


class Torchrun(Launcher):
    """`torchrun` on c10d, with the variable without which it does not recover."""

    name = "torchrun (c10d)"

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder)
        self._held = proc.HeldPort()
        self.port = self._held.port
        self._bin = Path(python).parent

    def program(self) -> list[str]:
        """The launcher itself."""
        return [str(self._bin / "torchrun")]

    def meeting(self, number: int) -> list[str]:
        """Where nodes meet."""
        argv = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        return [*argv, "--rdzv-conf", f"is_host={int(number == 0)}"]

    def nnodes(self) -> str:
        """A node beyond these waits."""
        return f"{NODES}:{NODES}"

    def argv(self, number: int) -> list[str]:
        """torch's flags."""
        argv = [*self.program(), *self.meeting(number), "--rdzv-id", "bench"]
        argv += ["--nnodes", self.nnodes(), "--nproc-per-node", str(SLOTS)]
        argv += ["--local-addr", "127.0.0.1", "--max-restarts", "10"]
        argv += ["--log-dir", str(self.folder / "logs")]
        return [*argv, str(self.folder / WORK.name), str(self.folder)]

    def env(self) -> dict[str, str]:
        """The cure."""
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Nvrx(Torchrun):
    """NVRx's `ft_launcher`."""

    name = "NVRx ft_launcher"

    def program(self) -> list[str]:
        """Without GPUs and network cards to look after."""
        argv = [str(self._bin / "ft_launcher"), "--ignore-missing-fault-tol-cfg"]
        return [*argv, "--ft-enable-nic-monitor", "False"]


class Plugin(Torchrun):
    """`torchrun`, meeting on Holdfast's ledger."""

    name = "torchrun --rdzv-backend holdfast"
    lease_s = 5.0

    def meeting(self, number: int) -> list[str]:
        """The ledger; no node is the host."""
        del number
        url = f"sqlite:///{self.folder}/ledger.db"
        return ["--rdzv-backend", "holdfast", "--rdzv-endpoint", url]


class Cluster:
    """The agents of a session. Use `with`: whatever is left is killed."""

    def __init__(self, launcher: Launcher, limit_s: float) -> None:
        self.launcher, self.limit_s = launcher, limit_s
        self.agents: list[proc.Child] = []
        self._mark = secrets.token_hex(8)

    def __enter__(self) -> "Cluster":
        # Peers' workers outlive their agents; they must not outlive us, however we end.
        argv = [sys.executable, "-c", _REAPER, f"{_MARK}={self._mark}"]
        self._reaper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill_group()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()

    def start(self, number: int) -> None:
        """Start a node, or another in its place."""
        folder = self.launcher.folder
        env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            _MARK: self._mark,
            **self.launcher.env(),
        }
        log = folder / f"agent-{number}.log"
        child = proc.spawn(self.launcher.argv(number), name=f"node {number}", env=env, log=log)
        self.agents[number : number + 1] = [child]

    def lines(self) -> list[Line]:
        """All that workers have told."""
        found = []
        for path in self.launcher.folder.glob("worker-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # its end is still to be written
                    found.append(json.loads(line))
        return found

    def until(self, what: str, test: Callable[[], Any], limit_s: float) -> Any:
        """Wait for something."""
        deadline = time.monotonic() + limit_s
        while not (found := test()):
            if time.monotonic() > deadline:
                raise TimedOut(f"{what}: not within {limit_s:g} s")
            time.sleep(_LOOK_S)
        return found

    def reduced(self, since: float) -> dict[int, Line] | None:
        """The first all-reduces of workers that began later, by rank, when all have done it."""
        late = {one["pid"] for one in self.lines() if one["what"] == "began" and one["at"] > since}
        found = {
            one["rank"]: one
            for one in self.lines()
            if one["what"] == "reduced" and one["pid"] in late
        }
        return found if len(found) == NODES * SLOTS else None

    def recovery(self, what: str, since: float) -> Recovery:
        """Wait for all-reduces after a kill."""
        found = self.until(what, lambda: self.reduced(since), self.limit_s)
        pids = {one["pid"] for one in found.values()}
        at = {
            name: max(
                one["at"] for one in self.lines() if one["pid"] in pids and one["what"] == name
            )
            for name in ("began", "group", "reduced")
        }
        return Recovery(*(at[name] - since for name in ("began", "group", "reduced")))

    def workers(self, number: int) -> dict[int, int]:
        """Rank to pid of the newest workers below an agent."""
        below = descendants(self.agents[number].pid)
        return {
            one["rank"]: one["pid"]
            for one in self.lines()
            if one["what"] == "reduced" and one["pid"] in below
        }

    def active(self) -> list[int]:
        """Which nodes have workers."""
        return [number for number in range(len(self.agents)) if self.workers(number)]

    def kill_worker(self) -> Recovery:
        """kill -9 one worker, of a node that is not the host."""
        number = max(self.active())
        pid = self.workers(number)[max(self.workers(number))]
        since = time.time()
        os.kill(pid, signal.SIGKILL)
        return self.recovery("all-reduce after the kill of a worker", since)

    def kill_node(self) -> tuple[Recovery, int]:
        """kill -9 a node's agent with all its workers and helpers."""
        number = max(self.active())
        family = descendants(self.agents[number].pid)
        since = time.time()
        for pid in (self.agents[number].pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.recovery("all-reduce after the kill of a node", since), number

    def end(self) -> Ending:
        """Let the workers succeed, and wait for all agents."""
        (self.launcher.folder / "enough").touch()
        ended = [0.0] * len(self.agents)
        deadline = time.monotonic() + self.limit_s
        while not all(ended) and time.monotonic() < deadline:
            for index, agent in enumerate(self.agents):
                if not ended[index] and not agent.alive():
                    ended[index] = time.time()
            time.sleep(_LOOK_S)
        codes = tuple(a._exit() if at else None for a, at in zip(self.agents, ended, strict=True))
        last = max((one["at"] for one in self.lines() if one["what"] == "ended"), default=0.0)
        took = max(ended) - last if all(ended) else float("inf")
        return Ending(took, codes)


def descendants(pid: int) -> set[int]:
    """The processes below one."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{one}/task").glob("*/children"):
                below = set(map(int, path.read_text().split())) - found
                found |= below
                waiting += below
    return found


def session(launcher: Launcher, limit_s: float) -> Session:
    """Start, kill a worker, kill a node, bring a new one, end."""
    launcher.folder.mkdir(parents=True)
    shutil.copy(WORK, launcher.folder)  # as a user's script: beside none of our modules
    shown = Session()
    try:
        with Cluster(launcher, limit_s) as cluster:
            for number in range(NODES):
                cluster.start(number)
            cluster.until("first all-reduce", lambda: cluster.reduced(0.0), START_S)
            launcher.settle(cluster.agents)
            shown = shown._replace(worker=cluster.kill_worker())
            cluster.start(NODES)
            launcher.settle(cluster.agents)
            time.sleep(JOIN_S)
            recovery, dead = cluster.kill_node()
            shown = shown._replace(node=recovery)
            cluster.start(dead)
            launcher.settle(cluster.agents)
            time.sleep(JOIN_S)
            shown = shown._replace(ending=cluster.end())
    except TimedOut as error:
        shown = shown._replace(trouble=str(error))
    return shown
