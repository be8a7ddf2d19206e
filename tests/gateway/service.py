"""`holdfast serve` for tests: real processes, and ways to ask and to hurt them."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast import proc
from kids import below
from patience import HANG_S, until

TOY = f"{sys.executable} -u {Path(__file__).parents[1] / 'jobs' / 'toy.py'}"
LIMIT_S = HANG_S


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be another server, which answers everything with 200."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    raw: bytes
    took_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


def ask(port: int, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
    """One request to a port of this machine, on a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as line:
        began = time.monotonic()
        raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        line.request(method, path, raw, headers)
        response = line.getresponse()
        content = response.read()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, content, time.monotonic() - began)


class Service:
    """One `holdfast serve`."""

    def __init__(self, child: proc.Child, folder: Path) -> None:
        self.child, self.folder = child, folder
        self.port, self.url, self.key = 0, "", ""
        self.account = "local"

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, port: int = 0
    ) -> Answer:
        """One request on a connection of its own; `port`: at another door than its own."""
        headers = {"X-Api-Key": self.key if key is None else key}
        return ask(port or self.port, method, path, body, headers)

    def said(self) -> str:
        """What it has written."""
        return (self.folder / "serve.log").read_text()

    def is_ready(self) -> bool:
        """Whether it serves; its note says where, and which life of it has written it."""
        try:
            note = json.loads((self.folder / "serve.json").read_text())
            if note["pid"] != self.child.pid:
                return False
            self.url, self.key = note["url"], note["key"]
            self.port = int(self.url.rpartition(":")[2])
            return self.ask("GET", "/readyz").status == 200
        except OSError:
            return False

    def jobs(self, job: str = "", rest: str = "") -> str:
        path = f"/v1/accounts/{self.account}/rlorTrainerJobs"
        return f"{path}/{job}{rest}" if job else path

    def way(self, job: str, path: str = "/api/v1/hello") -> str:
        return f"/training/v1/rlorTrainerJobs/{self.account}/{job}{path}"

    def create(self, job: str, spec: dict[str, Any] | None = None) -> None:
        made = self.ask("POST", f"{self.jobs()}?rlorTrainerJobId={job}", spec or {})
        assert made.status == 200, made

    def state(self, job: str) -> str:
        told: str = self.ask("GET", self.jobs(job)).json["state"]
        return told.removeprefix("JOB_STATE_")

    def wait(self, job: str, state: str = "RUNNING") -> None:
        until(lambda: self.state(job) == state, f"{job} is {state}")

    def add_account(self, account: str) -> str:
        """A key of another account, made as an operator makes it."""
        argv = [sys.executable, "-m", "holdfast", "accounts", "key", account]
        argv += ["--ledger", f"sqlite:///{self.folder}/ledger.db"]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    # ---- hurting it ----------------------------------------------------------------

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes below this service whose command says `word`."""
        return below(self.child.pid, word)

    def kill(self, word: str) -> int:
        """SIGKILL for one of them; returns its pid."""
        victim = self.processes(word)[0]
        os.kill(victim.pid, signal.SIGKILL)
        return victim.pid


@contextlib.contextmanager
def started(
    folder: Path,
    *flags: str,
    ledger: str | None = None,
    trainer: str = TOY,
    lag_s: float = 0.0,
    naive: bool = False,
) -> Iterator[Service]:
    """A service in a folder, not waited for; when it is left, everything of it is killed.

    With `lag_s` its gateways hear of changes up to so much later (see `stale`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    url = ledger or f"sqlite:///{folder}/ledger.db"
    argv = [
        *(sys.executable, "-m", "gateway.stale" if lag_s else "holdfast", "serve"),
        *("--ledger", url, "--folder", str(folder), "--port", "0", "--trainer", trainer, *flags),
    ]
    env = {"XDG_STATE_HOME": str(folder / "state")}
    if lag_s:
        env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "STALE_LAG_S": str(lag_s)}
        env |= {"STALE_NAIVE": "1"} if naive else {}
    with proc.spawn(argv, env=env, log=folder / "serve.log") as child:
        yield Service(child, folder)


@contextlib.contextmanager
def serve(folder: Path, *flags: str, **how: Any) -> Iterator[Service]:
    """A service that is ready; see `started`."""
    with started(folder, *flags, **how) as service:
        service.child.wait_until(service.is_ready, LIMIT_S)
        yield service
