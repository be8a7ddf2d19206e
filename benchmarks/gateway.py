"""The gateway against nginx and HAProxy as plain reverse proxies, in one run.

`python -m benchmarks.gateway [--seconds 5] [--rounds 3]`. One process (one worker, one thread)
each, the same upstream behind them, 32 connections kept alive. First our own peak; then half of
that load, at fixed times (a request that has to wait for a connection counts from when it was
due), for all of them in turn; then bodies of 64 MB. Ours checks an API key, finds the route,
writes the fence's headers and an access log; the others pass everything on.
"""

import argparse
import asyncio
import contextlib
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.gateway_load import Load, Result, sink, upload
from holdfast import ledger, proc
from holdfast.errors import MissingPackage
from holdfast.gateway.http import run
from holdfast.gateway.process import GatewaySettings
from holdfast.jobs import decide
from holdfast.jobs.accounts import Accounts
from holdfast.jobs.serving import SETTINGS
from holdfast.jobs.store import Jobs
from holdfast.ledger import LiveRuntime

CONNECTIONS = 32
BODY_BYTES = 64 << 20
WARM_S = 1.0


def _nginx(folder: Path, name: str, http: str) -> proc.Child:
    """nginx with one worker and a configuration of its own."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        raise MissingPackage("nginx is not installed (Debian: apt-get install nginx-light)")
    here = folder / name
    here.mkdir()
    temps = "".join(
        f"{kind}_temp_path {here}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = here / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {here}/pid; error_log {here}/error.log;\n"
        f"events {{ worker_connections 1024; }}\n"
        f"http {{ access_log off; {temps} client_max_body_size 0; keepalive_requests 100000000;\n"
        f"{http}\n}}\n"
    )
    return proc.spawn([program, "-p", str(here), "-c", str(config)], log=here / "log")


def _haproxy(folder: Path, listen: int, small: int, large: int) -> proc.Child:
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not Path(program).exists():
        raise MissingPackage("haproxy is not installed (Debian: apt-get install haproxy)")
    config = folder / "haproxy.cfg"
    config.write_text(
        "global\n  nbthread 1\n"
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
        "  http-reuse always\n"
        f"frontend f\n  bind 127.0.0.1:{listen}\n"
        "  use_backend large if { method POST }\n  default_backend small\n"
        f"backend small\n  server s 127.0.0.1:{small}\n"
        f"backend large\n  server l 127.0.0.1:{large}\n"
    )
    return proc.spawn([program, "-db", "-f", str(config)], log=folder / "haproxy.log")


class Ours:
    """One gateway process, and two jobs that are recorded as RUNNING at the upstreams."""

    access_log = True

    def __init__(self, folder: Path, port: int, small: int, large: int) -> None:
        self.url = f"sqlite:///{folder}/ledger.db"
        self.key = ""
        self._upstreams = {"small": small, "large": large}
        self._stack = contextlib.AsyncExitStack()
        settings = GatewaySettings(
            run="bench",
            ledger=self.url,
            name="gateway",
            folder=str(folder),
            port=port,
            access_log=self.access_log,
        )
        argv = [sys.executable, "-m", "holdfast.gateway.process"]
        env = {SETTINGS: msgspec.json.encode(settings).decode()}
        self.child = proc.spawn(argv, env=env, log=folder / "gateway.log")

    async def __aenter__(self) -> "Ours":
        opened = await self._stack.enter_async_context(ledger.open(self.url))
        runtime = LiveRuntime(opened)
        jobs = Jobs(runtime, "bench", time.time)
        self.key, _ = await Accounts(runtime, "bench", time.time).add_key("a")
        lease = await opened.grant(3600.0)
        for name, port in self._upstreams.items():
            await jobs.create("a", name, {})
            found = await jobs.get("a", name)
            taken = decide.take(found.job, "bench", time.time())
            assert taken is not None
            await jobs.commit(found, taken, ops=[jobs.alive_op(taken, lease.id)])
            found = await jobs.get("a", name)
            ready = decide.ready(found.job, found.job.epoch, f"127.0.0.1:{port}", time.time())
            assert ready is not None
            await jobs.commit(found, ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def path(self, job: str) -> str:
        return f"/training/v1/rlorTrainerJobs/a/{job}/api/v1/x"


@contextlib.contextmanager
def _children(*children: proc.Child) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for child in children:
            stack.enter_context(child)
        yield


def _request(path: str, key: str = "", method: str = "GET", length: int = 0) -> bytes:
    auth = f"X-Api-Key: {key}\r\n" if key else ""
    body = f"Content-Length: {length}\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\n{auth}{body}\r\n".encode()


async def _measure(seconds: float, rounds: int, folder: Path) -> None:
    held = [proc.HeldPort() for _ in range(5)]
    small, large, ngx, hap, mine = (one.port for one in held)
    reply = "return 200 '" + "x" * 100 + "';"
    upstream = f"server {{ listen 127.0.0.1:{small}; location / {{ {reply} }} }}"
    proxy = (
        f"upstream small {{ server 127.0.0.1:{small}; keepalive 64; "
        f"keepalive_requests 100000000; }}\n"
        f"upstream large {{ server 127.0.0.1:{large}; keepalive 4; }}\n"
        f"server {{ listen 127.0.0.1:{ngx}; proxy_http_version 1.1; "
        f"proxy_set_header Connection ''; location / {{ proxy_pass http://small; }}\n"
        f"location /large {{ proxy_request_buffering off; proxy_pass http://large; }} }}"
    )
    ours = Ours(folder, mine, small, large)
    with _children(
        _nginx(folder, "upstream", upstream),
        _nginx(folder, "proxy", proxy),
        _haproxy(folder, hap, small, large),
        ours.child,
    ):
        server = await sink(large)
        async with ours, server:
            await _tables(seconds, rounds, ours, (small, large, ngx, hap, mine))


async def _tables(seconds: float, rounds: int, ours: Ours, ports: tuple[int, ...]) -> None:
    small, large, ngx, hap, mine = ports
    targets = {
        "no proxy": (small, _request("/api/v1/x")),
        "nginx": (ngx, _request("/api/v1/x")),
        "HAProxy": (hap, _request("/api/v1/x")),
        "Holdfast": (mine, _request(ours.path("small"), ours.key)),
    }
    for port, request in targets.values():
        await Load(port, request, CONNECTIONS).wait_until_there()
    peaks: dict[str, list[float]] = {name: [] for name in targets}
    cpu: dict[str, list[float]] = {"Holdfast": []}
    for _ in range(rounds):
        for name, (port, request) in targets.items():
            load = Load(port, request, CONNECTIONS)
            before = _cpu_s(ours.child.pid)
            result = await load.flat_out(WARM_S, seconds)
            peaks[name].append(result.per_s)
            if name == "Holdfast":
                cpu[name].append((_cpu_s(ours.child.pid) - before) / result.count * 1e6)
    peak = statistics.median(peaks["Holdfast"])
    rate = peak / 2
    at_half: dict[str, list[Result]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, (port, request) in targets.items():
            load = Load(port, request, CONNECTIONS)
            at_half[name].append(await load.at(rate, WARM_S, seconds))
    print(f"\n## Gateway: {platform.processor() or platform.machine()}, {CONNECTIONS} connections")
    heads = "small requests | peak, requests/s | at half of our peak: p50 | p99"
    print(f"\n| {heads} | added p50 | added p99 |")
    print("| --- | --- | --- | --- | --- | --- |")
    p50 = {n: statistics.median(r.quantile(0.5) for r in rs) for n, rs in at_half.items()}
    p99 = {n: statistics.median(r.quantile(0.99) for r in rs) for n, rs in at_half.items()}
    for name in targets:
        added = [p50[name] - p50["no proxy"], p99[name] - p99["no proxy"]]
        shown = ["", ""] if name == "no proxy" else [f"{one * 1e3:.2f} ms" for one in added]
        print(
            f"| {name} | {statistics.median(peaks[name]):,.0f} | {p50[name] * 1e3:.2f} ms | "
            f"{p99[name] * 1e3:.2f} ms | {shown[0]} | {shown[1]} |"
        )
    ratio = (p99["Holdfast"] - p99["no proxy"]) / max(1e-9, p99["nginx"] - p99["no proxy"])
    print(f"\nadded p99 against nginx's, at {rate:,.0f} requests/s: {ratio:.1f}× (aim ≤ 3)")
    print(f"our gateway's CPU per request, flat out: {statistics.median(cpu['Holdfast']):.0f} µs")
    bodies = {
        "no proxy": (large, _request("/large", method="POST", length=BODY_BYTES)),
        "nginx": (ngx, _request("/large", method="POST", length=BODY_BYTES)),
        "HAProxy": (hap, _request("/large", method="POST", length=BODY_BYTES)),
        "Holdfast": (mine, _request(ours.path("large"), ours.key, "POST", BODY_BYTES)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds + 2):
        for name, (port, request) in bodies.items():
            speeds[name].append(await asyncio.to_thread(upload, port, request, BODY_BYTES))
    print("\n| bodies of 64 MB | MB/s, median | against nginx |\n| --- | --- | --- |")
    base = statistics.median(speeds["nginx"])
    for name, found in speeds.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle / 1e6:,.0f} | {middle / base:.2f}× |")
    print(f"\nour gateway's memory: {psutil.Process(ours.child.pid).memory_info().rss >> 20} MiB")


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-access-log", action="store_true")
    given: Any = parser.parse_args()
    Ours.access_log = not given.no_access_log
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        Path(name).chmod(0o755)  # nginx's worker is somebody else
        run(_measure(given.seconds, given.rounds, Path(name)))


if __name__ == "__main__":
    main()
