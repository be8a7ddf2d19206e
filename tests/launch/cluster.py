"""Several nodes on one machine: real agents of `holdfast launch` on addresses of their own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from holdfast import ledger, proc
from holdfast.ledger.records import decode
from holdfast.rendezvous.records import Cycle, Keys
from patience import until

SCRIPT = str(Path(__file__).with_name("training.py"))


def holdfast(
    *args: str, url: str = "", timeout_s: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    """Run the command line tool."""
    env = {**os.environ, **({"HOLDFAST_LEDGER": url} if url else {})}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def descendants(pid: int) -> list[int]:
    """The processes below one, whatever their groups."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    return []


class Commits:
    """Follows what workers commit: under one rank of one cycle there is only ever one worker."""

    def __init__(self, url: str, run: str = "r") -> None:
        self.seen: dict[tuple[int, int], set[int]] = {}
        self.ports: set[str] = set()
        self.steps: list[int] = []
        self._prefix = f"/runs/{run}/commits/"
        self._ledger = ledger.open_sync(url)
        self._watch = self._ledger.watch(self._prefix, start=1)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ending.is_set():
            batch = self._watch.next(0.2)
            for event in batch.events if batch is not None else ():
                if event.entry is None:
                    continue
                name, value = event.key.removeprefix(self._prefix), json.loads(event.entry.value)
                if name.startswith("rank_"):
                    place = int(name.removeprefix("rank_")), value["cycle"]
                    self.seen.setdefault(place, set()).add(value["pid"])
                    self.ports.add(value["port"])
                elif name == "step":
                    self.steps.append(value)

    def close(self) -> None:
        """Stop, and check what was seen."""
        self._ending.set()
        self._thread.join()
        self._watch.close()
        self._ledger.close()
        assert all(len(pids) == 1 for pids in self.seen.values()), self.seen
        assert self.steps == list(range(1, len(self.steps) + 1)), self.steps


class Nodes:
    """The agents of one run, whatever program they are. Use `with`: whatever is left is killed."""

    def __init__(
        self, folder: Path, url: str, *, run: str = "r", nnodes: str, flags: Sequence[str] = ()
    ) -> None:
        self.folder, self.url, self.run, self.nnodes = folder, url, run, nnodes
        self.flags = list(flags)
        self.agents: dict[str, proc.Child] = {}
        self.all: list[proc.Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.all:
            agent.kill_group()

    def spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None) -> proc.Child:
        """Start the agent of a node."""
        log = self.folder / f"{name}.{len(self.all)}.log"
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        agent = self.agents[name] = proc.spawn(argv, name=name, log=log, env=env)
        self.all.append(agent)
        return agent

    def codes(self, *names: str, timeout_s: float = 20.0) -> list[int]:
        """The exit codes of nodes, once they have ended."""
        agents = [self.agents[name] for name in names]
        self.until("end", lambda: not any(agent.alive() for agent in agents), timeout_s)
        return [agent.wait(1.0) for agent in agents]

    def said(self, name: str) -> str:
        """What the newest agent of a node has said."""
        return _log(self.agents[name])

    def cycle(self) -> Cycle:
        """The run's record."""
        with ledger.open_sync(self.url) as opened:
            entry = opened.get(Keys(self.run).cycle)
        assert entry is not None
        return decode(Cycle, entry)

    def committed(self, name: str) -> Any:
        """What the workers have committed."""
        with ledger.open_sync(self.url) as opened:
            entry = opened.get(f"/runs/{self.run}/commits/{name}")
        return None if entry is None else json.loads(entry.value)

    def step(self) -> int:
        """How far the training is."""
        return int(self.committed("step") or 0)

    def until_step(self, step: int) -> None:
        """Wait until the training is so far."""
        self.until(f"step {step}", lambda: self.step() >= step, 240)

    def trained(self, steps: int | None = None) -> None:
        """The training has done all of its steps, each once."""
        done = self.step()
        assert steps in (None, done)
        assert self.committed("total") == done * (done + 1) // 2

    def until(self, what: str, test: Callable[[], object], timeout_s: float = 90.0) -> Any:
        """Wait for something; tells what the agents said when it does not come."""
        return until(test, lambda: f"{what}\n{self.story()}", timeout_s)

    def story(self) -> str:
        """What every agent has said."""
        return "\n".join(f"--- {agent.name} ---\n{_log(agent)[-4000:]}" for agent in self.all)


def _log(agent: proc.Child) -> str:
    assert agent.log is not None
    return agent.log.read_text(errors="replace")


class Cluster(Nodes):
    """Agents of `holdfast launch`."""

    def start(
        self,
        name: str,
        *program: str,
        flags: Sequence[str] = (),
        url: str | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> proc.Child:
        """Start a node; its number gives its address. `url`: its own way to the ledger.

        `prefix` comes before the command; `env` and `flags` count more than what is said here.
        """
        number = int(name[1:])
        argv = [*prefix, sys.executable, "-m", "holdfast", "launch"]
        argv += ["--run", self.run, "--ledger", url or self.url, "--nnodes", self.nnodes]
        argv += ["--node-name", name, "--local-addr", f"127.0.1.{number + 1}"]
        argv += ["--infra-rank", str(number), "--log-dir", str(self.folder / name)]
        return self.spawn(name, [*argv, *self.flags, *flags, *program], env)

    def begin(self, *program: str, bad: str = "") -> None:
        """Start the nodes n0, n1 and n2; the bad one has a variable BAD."""
        for name in ("n0", "n1", "n2"):
            self.start(name, *program, env={"BAD": "1"} if name == bad else {})

    def status(self) -> dict[str, Any]:
        """What `holdfast status --json` says; empty before there is a run."""
        found = holdfast("status", self.run, "--json", url=self.url)
        return json.loads(found.stdout) if found.returncode == 0 else {}

    def states(self) -> dict[str, str]:
        """Node → what it is."""
        return {node["name"]: node["state"] for node in self.status().get("nodes", ())}

    def members(self) -> list[str]:
        """The nodes that hold ranks, by rank."""
        return [member.name for member in self.cycle().members]

    def below(self) -> list[int]:
        """The processes of all living agents."""
        return [pid for agent in self.all if agent.alive() for pid in descendants(agent.pid)]

    def workers(self, name: str) -> dict[int, int]:
        """Rank → pid of the newest cycle's workers on a node, from what they have committed."""
        prefix = f"/runs/{self.run}/commits/rank_"
        with ledger.open_sync(self.url) as opened:
            entries = opened.range(prefix).entries
        pids = {
            int(entry.key.removeprefix(prefix)): int(json.loads(entry.value)["pid"])
            for entry in entries
        }
        below = set(descendants(self.agents[name].pid))
        return {rank: pid for rank, pid in pids.items() if pid in below}


def there(pids: list[int]) -> list[int]:
    """The processes that are still there, zombies too."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
