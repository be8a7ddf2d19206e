"""The figures of the store: what a proven transfer costs beside the bare one, and beside others.

`python -m benchmarks.transfer [--repeats 5] [--seconds 320] [NAME ...]`. Two processes, one that
puts and one that gets. Contenders that are compared take turns, each of them first as often as
last; medians; one turn before is not counted. Every value that was got is compared with what was
put, outside of the clock. Other people's systems run in `.venv-peers` (`scripts/setup-peers`).
"""

import argparse
import contextlib
import json
import os
import platform
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.transfer_tables import Figures, Result, ratios
from benchmarks.transfer_work import WORKLOADS, make_source
from holdfast import proc
from holdfast.errors import NotFound
from holdfast.servers import MooncakeHolder, MooncakeServer, RedisServer
from holdfast.transfer.shm import remove

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
NOT_INSTALLED = "not installed: scripts/setup-peers"
START_S = 120.0
ASK_S = 90.0
SLOW_TURNS = 3
"""Peers and Mooncake get no more turns that count."""


LARGE = ("16 MiB",)


class Entry(NamedTuple):
    """Somebody who takes part."""

    name: str
    kind: str
    how: dict[str, Any]
    most: int = 1_000_000
    """At most so many keys: whoever would take minutes is measured on fewer."""
    turns: int = 1000
    peer: bool = False
    skips: tuple[str, ...] = ()
    """Workloads that it is not meant for."""


class Failed(Exception):
    """A contender did not do what it was told."""


class Process:
    """A child that answers lines."""

    def __init__(self, kind: str, how: dict[str, Any], place: "Place", *, peer: bool) -> None:
        module = "benchmarks.transfer_peers" if peer else "benchmarks.transfer_child"
        python = str(PEERS) if peer else sys.executable
        self.log = place.folder / f"{kind}-{uuid.uuid4().hex[:8]}.log"
        argv = [python, "-m", module, kind, str(place.source), str(self.log), json.dumps(how)]
        self._child = proc.spawn(
            argv,
            env=_environment(place) if peer else {"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._child.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our hands
            for line in self._child.process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def hear(self, limit_s: float) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise Failed(f"no answer in {limit_s:.0f} s") from None
        if not line:
            raise Failed(f"it ended: {_tail(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def ask(self, do: str, workload: str, most: int, told: Any = None) -> dict[str, Any]:
        """Tell it to do something, and wait for the answer."""
        asked = json.dumps({"do": do, "workload": workload, "most": most, "told": told})
        assert self._child.process.stdin is not None
        try:
            self._child.process.stdin.write(f"{asked}\n".encode())
            self._child.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"it ended: {_tail(self.log)}") from None
        return self.hear(ASK_S)

    def close(self, grace_s: float = 0.0) -> None:
        """End it; with some grace when it has others to end."""
        with contextlib.suppress(Exception):
            if grace_s:
                assert self._child.process.stdin is not None
                self._child.process.stdin.close()
                self._child.wait(grace_s)
        self._child.kill_group()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:160] if lines else "it said nothing"


class Place(NamedTuple):
    """Where a run keeps what it needs."""

    folder: Path
    source: Path
    secret: str
    """What whoever joins our Ray must know: others on this machine do not."""


def _environment(place: Place) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": place.secret,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray takes another address than loopback otherwise, whatever it is told.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "TQ_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def ray_head(place: Place) -> Iterator[dict[str, Any]]:
    """A Ray for the peers: where to join it, or nothing where they are not installed."""
    if not PEERS.exists():
        yield {}
        return
    head = Process("head", {"folder": str(place.folder / "ray")}, place, peer=True)
    try:
        found = {}
        with contextlib.suppress(Failed):  # then those who need it say so
            found["address"] = head.hear(START_S)["address"]
        yield found
    finally:
        head.close(grace_s=15.0)


# ---- who takes part ----------------------------------------------------------------------


@contextlib.contextmanager
def redis_group(place: Place, _: dict[str, Any]) -> Iterator[list[Entry]]:
    """Redis."""
    with RedisServer(place.folder / "redis", args=("--appendonly", "no")) as server:
        bare, ours = {"host": server.host, "port": server.port}, {"url": server.url}
        yield [
            Entry("redis-py, bare", "redis", bare),
            Entry("redis", "holdfast", ours),
            Entry("redis-py, bare, rows", "redis-rows", bare, skips=LARGE),
            Entry("redis, rows", "rows", ours, skips=LARGE),
        ]


@contextlib.contextmanager
def memory_group(place: Place, ray: dict[str, Any]) -> Iterator[list[Entry]]:
    """Everything on this machine alone."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    memory = place.source.with_name(name)
    memory.write_bytes(bytes(1 << 30))  # warm
    shm = {"url": f"shm://{name}?budget=6G"}
    unproven = {"url": f"shm://{name}-x?budget=6G"}
    simple = {"storage_backend": "SimpleStorage"}
    try:
        yield [
            Entry("memcpy", "memcpy", {}),
            Entry("memcpy into new memory", "memcpy-new", {}),
            Entry("shared memory, bare", "memory", {"path": str(memory)}),
            Entry("shm", "holdfast", shm),
            Entry("shm without checksum", "unproven", unproven),
            Entry("shm, rows", "rows", shm, skips=LARGE),
            Entry("shm, get_into", "into", shm),
            Entry("shm, view", "view", shm),
            Entry(
                "TransferQueue SimpleStorage",
                "transferqueue",
                {**ray, "backend": simple},
                most=20_000,
                turns=SLOW_TURNS,
                peer=True,
            ),
            Entry("Ray object store", "ray", ray, most=2_000, turns=SLOW_TURNS, peer=True),
        ]
    finally:
        memory.unlink()
        for one in (name, f"{name}-x"):
            with contextlib.suppress(NotFound):  # nobody who uses it took part
                remove(one)


@contextlib.contextmanager
def mooncake_group(place: Place, ray: dict[str, Any]) -> Iterator[list[Entry]]:
    """Mooncake over TCP, all with the same process that lends its memory."""
    with (
        MooncakeServer(place.folder / "mooncake") as master,
        MooncakeHolder(place.folder / "holder", master, nbytes=4 << 30),
    ):
        ours = {"url": f"{master.url}&segment=0"}
        bare = {"metadata": master.metadata, "port": master.port}
        section = {
            "auto_init": False,  # it would end every master on this machine
            "metadata_server": master.metadata,
            "master_server_address": f"127.0.0.1:{master.port}",
            "local_hostname": "127.0.0.1",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
        }
        theirs = {"storage_backend": "MooncakeStore", "MooncakeStore": section}
        yield [
            Entry("Mooncake client, bare", "mooncake", bare, 10_000, SLOW_TURNS),
            Entry("mooncake", "holdfast", ours, 10_000, SLOW_TURNS),
            Entry(
                "TransferQueue + Mooncake",
                "transferqueue",
                {**ray, "backend": theirs},
                most=4_000,
                turns=SLOW_TURNS,
                peer=True,
            ),
        ]


GROUPS = {
    "redis": (redis_group, 0.2),
    "memory": (memory_group, 0.75),
    "mooncake": (mooncake_group, 1.0),
}
"""Who is compared with whom, and which part of the time is over then. Redis comes before Ray."""


# ---- measuring ---------------------------------------------------------------------------


class Team:
    """The two processes of one contender, and what came of it."""

    def __init__(self, entry: Entry, place: Place) -> None:
        self.entry = entry
        self.result = Result(entry.name, entry.most)
        self._pair: list[Process] = []
        if entry.peer and not PEERS.exists():
            self.result.trouble = NOT_INSTALLED
            return
        self._place = place
        self._pair = [self._start(), self._start()] if not entry.peer else [self._start()]

    def _start(self) -> Process:
        entry = self.entry
        return Process(entry.kind, entry.how, self._place, peer=entry.peer)

    def ready(self) -> None:
        """Wait until both answer. Of a peer the second one joins what the first has started."""
        try:
            for process in list(self._pair):
                process.hear(START_S)
            if len(self._pair) == 1:
                self._pair.append(self._start())
                self._pair[1].hear(START_S)
        except Failed as error:
            self._give_up(error)

    def wants(self, workload: str, turn: int) -> bool:
        """Whether it takes part in a turn."""
        out = self.result.trouble or workload in self.entry.skips
        return not out and turn <= self.entry.turns

    def turn(self, workload: str, *, counted: bool) -> None:
        """Put, get, clear."""
        (putting, getting), most = self._pair, self.entry.most
        try:
            put = putting.ask("put", workload, most)
            got = getting.ask("get", workload, most, put["told"])
            if not got["right"]:
                raise Failed("wrong values")
            putting.ask("clear", workload, most)
            if counted:
                self.result.add(workload, put["s"], got["s"])
            if self.entry.name == "shm" and counted:
                self.result.digests.setdefault(workload, []).append(
                    putting.ask("digest", workload, most)["s"]
                )
        except Failed as error:
            self._give_up(error)

    def _give_up(self, error: Failed) -> None:
        self.result.trouble = f"failed: {error}"
        self.close()

    def close(self) -> None:
        """End both."""
        for process in reversed(self._pair):
            process.close(grace_s=5.0 if self.entry.peer else 0.0)
        self._pair = []


def compete(entries: Sequence[Entry], place: Place, repeats: int, end: float) -> Sequence[Result]:
    """Let these take turns on all workloads until a time, or a little longer.

    When it is late there are fewer turns. Each contender has one that counts: if need be the
    first, which finds nothing warm.
    """
    with contextlib.ExitStack() as stack:
        teams = [Team(entry, place) for entry in entries]
        for team in teams:
            stack.callback(team.close)
        for team in teams:
            team.ready()
        for number, workload in enumerate(WORKLOADS):
            now = time.monotonic()
            enough = now + max(0.0, end - now) / (len(WORKLOADS) - number)
            for turn in range(repeats + 1):
                if turn > 1 and time.monotonic() > enough:
                    break
                here = [team for team in teams if team.wants(workload, turn)]
                first = (turn + number) % max(1, len(here))
                for team in here[first:] + here[:first]:
                    late = time.monotonic() > enough
                    if not late or not team.result.puts.get(workload):
                        team.turn(workload, counted=turn > 0 or late)
                        team.result.cold |= {workload} if late and not turn else set()
                print(
                    f"{workload}, turn {turn}: {time.monotonic() - now:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
        return [team.result for team in teams]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=320.0, help="about, all together")
    parser.add_argument("names", nargs="*", help="only these contenders")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing in shared memory
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    results: dict[str, Result] = {}
    source = Path("/dev/shm") / f"bench-{uuid.uuid4().hex[:8]}-source"
    began = time.monotonic()
    table = Figures()
    with tempfile.TemporaryDirectory(prefix="hb-") as folder, contextlib.ExitStack() as stack:
        stack.callback(source.unlink, missing_ok=True)
        make_source(source)
        place = Place(Path(folder), source, secrets.token_hex(32))
        ray: dict[str, Any] = {}
        for name, (group, part) in GROUPS.items():
            if name == "memory":
                ray = stack.enter_context(ray_head(place))
            with group(place, ray) as entries:
                chosen = [e for e in entries if not options.names or e.name in options.names]
                end = began + part * options.seconds
                found = compete(chosen, place, options.repeats, end) if chosen else []
            results |= {result.name: result for result in found}
            table.add(found)
    table.end()
    ratios(results)
    print(f"\nload {os.getloadavg()[0]:.1f}, {time.monotonic() - began:.0f} s")
    if any(one.trouble and one.trouble != NOT_INSTALLED for one in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
