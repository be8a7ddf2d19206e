"""Several nodes on one machine: real agents of `holdfast launch` on addresses of their own."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast import ledger, proc
from holdfast.ledger.types import Entry

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
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except FileNotFoundError:
            continue
        found += map(int, children)
        waiting += map(int, children)
    return found


class Agent:
    """One node's agent."""

    def __init__(self, child: proc.Child, name: str, log: Path) -> None:
        self.child, self.name, self.log = child, name, log

    @property
    def pid(self) -> int:
        return self.child.pid

    def code(self, timeout_s: float) -> int:
        """Wait for its end."""
        return self.child.wait(timeout_s)


class Commits:
    """Follows what workers commit: under one rank of one cycle there is only ever one worker."""

    def __init__(self, url: str, run: str) -> None:
        self.seen: dict[tuple[int, int], set[int]] = {}
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


class Cluster:
    """Agents of one run. Use `with`: whatever is left is killed."""

    def __init__(
        self, folder: Path, url: str, *, run: str = "r", nnodes: str, flags: Sequence[str] = ()
    ) -> None:
        self.folder, self.url, self.run, self.nnodes = folder, url, run, nnodes
        self.flags = list(flags)
        self.program: tuple[str, ...] = ()
        self.agents: dict[str, Agent] = {}
        self.all: list[Agent] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.all:
            agent.child.kill_group()

    def start(
        self,
        name: str,
        *program: str,
        flags: Sequence[str] = (),
        url: str | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Agent:
        """Start a node; its number gives its address. `url`: its own way to the ledger.

        `prefix` comes before the command; `env` and `flags` count more than what is said here.
        """
        number = int(name[1:])
        argv = [*prefix, sys.executable, "-m", "holdfast", "launch"]
        argv += ["--run", self.run, "--ledger", url or self.url, "--nnodes", self.nnodes]
        argv += ["--node-name", name, "--local-addr", f"127.0.1.{number + 1}"]
        argv += ["--infra-rank", str(number), "--log-dir", str(self.folder / name)]
        argv += [*self.flags, *flags, *program]
        log = self.folder / f"{name}.{len(self.all)}.log"
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        agent = Agent(proc.spawn(argv, name=name, log=log, env=env), name, log)
        self.agents[name] = agent
        self.all.append(agent)
        return agent

    def status(self) -> dict[str, Any]:
        """What `holdfast status --json` says; empty before there is a run."""
        found = holdfast("status", self.run, "--json", url=self.url)
        return json.loads(found.stdout) if found.returncode == 0 else {}

    def committed(self, name: str) -> Any:
        """What the workers have committed."""
        with ledger.open_sync(self.url) as opened:
            entry: Entry | None = opened.get(f"/runs/{self.run}/commits/{name}")
        return None if entry is None else json.loads(entry.value)

    def workers(self, name: str) -> dict[int, int]:
        """Rank → pid of the newest cycle's workers on a node, from what they have committed."""
        below = set(descendants(self.agents[name].pid))
        found = {}
        for rank in range(64):
            record = self.committed(f"rank_{rank}")
            if record is not None and record["pid"] in below:
                found[rank] = record["pid"]
        return found

    def until(self, what: str, test: Callable[[], object], timeout_s: float = 90.0) -> Any:
        """Wait for something; tells what the agents said when it does not come."""
        limit = time.monotonic() + timeout_s
        while not (found := test()):
            if time.monotonic() > limit:
                raise AssertionError(f"no {what} within {timeout_s} s\n{self.story()}")
            time.sleep(0.05)
        return found

    def step(self) -> int:
        """How far the training is."""
        return int(self.committed("step") or 0)

    def story(self) -> str:
        """What every agent has said."""
        texts = (f"--- {a.name} ---\n{a.log.read_text(errors='replace')}" for a in self.all)
        return "\n".join(text[-4000:] for text in texts)
