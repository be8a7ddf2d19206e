"""Two sides: Holdfast as it is here, and as it was when the fixtures were made.

A side is a way to start interpreters and commands that see one version of the package. The old one
comes from `tests/fixtures/package.tar.xz`. Programs of both sides are the same file
(`programs.py`); they talk to a test in lines of JSON, so that nothing here waits by guessing.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import gateway.service
from gateway.service import Answer
from holdfast.proc import spawn
from patience import HANG_S

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT_S = 2 * HANG_S


def unpack(name: str, folder: Path) -> Path:
    """Unpack a fixture below a folder; returns where it is."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def facts(folder: Path) -> Any:
    """What the maker of a fixture knew of it."""
    return json.loads((folder / "facts.json").read_text())


class Process:
    """A process that listens and tells in lines of JSON. Use `with`: it is killed, with its group.

    What it says of errors comes out where the test's own does.
    """

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._rest = b""
        self.child = spawn(argv, whole_env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.child.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the whole group, as often as one likes."""
        self.child.__exit__()

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        return self.child.wait(LIMIT_S)

    def tell(self, **what: Any) -> None:
        """Say one thing to it."""
        _pipe(self.child.process.stdin).write(json.dumps(what).encode() + b"\n")
        _pipe(self.child.process.stdin).flush()

    def hear(self) -> dict[str, Any]:
        """The next thing that it says."""
        fd, deadline = _pipe(self.child.process.stdout).fileno(), time.monotonic() + LIMIT_S
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            assert select.select([fd], [], [], max(0.0, left_s))[0], "it is silent"
            more = os.read(fd, 1 << 16)
            assert more, f"it ended with {self.child.wait(HANG_S)}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, **what: Any) -> dict[str, Any]:
        """Say one thing, and hear the answer."""
        self.tell(**what)
        return self.hear()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class Side:
    """One version of the package, and a folder for what its processes remember."""

    def __init__(self, name: str, state: Path, package: Path | None = None) -> None:
        self.name, self.package = name, package
        self._state = state

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "XDG_STATE_HOME": str(self._state), "OMP_NUM_THREADS": "1"}
        for name in ("HOLDFAST_LEDGER", "HOLDFAST_URL", "HOLDFAST_API_KEY"):
            env.pop(name, None)
        return {**env, "PYTHONPATH": str(self.package)} if self.package else env

    def start(self, *argv: str) -> Process:
        """Start python with these arguments."""
        return Process([sys.executable, *argv], self.env)

    def program(self, name: str, *argv: str) -> Process:
        """Start a program of `programs.py`, and see that it has the package of this side."""
        process = self.start(str(PROGRAMS), name, *argv)
        package = Path(process.hear()["package"])
        if self.package is not None:
            assert package == self.package / "holdfast", "this is not the old package"
        return process

    def command(self, *words: str, code: int = 0) -> str:
        """Run `holdfast` with these words to its end; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=4 * HANG_S,  # a whole run, on a busy machine
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def told(self, *words: str) -> list[Any]:
        """What a command prints as lines of JSON."""
        return [json.loads(line) for line in self.command(*words).splitlines()]


class Service(gateway.service.Service):
    """What a side serves."""

    def job(self, job: str) -> dict[str, Any]:
        """What the control plane says of a job."""
        told: dict[str, Any] = self.ask("GET", self.jobs(job)).json
        return told

    def trainer(self, job: str, path: str, body: Any = None) -> Answer:
        """Ask a trainer through the gateway, until it answers."""
        method = "GET" if body is None else "POST"
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self.ask(method, self.way(job, f"/api/v1/{path}"), body)
            if answer.status not in (408, 502, 503) or time.monotonic() > deadline:
                return answer
            time.sleep(0.05)

    def post(self, job: str, path: str, body: Any) -> Any:
        """Ask a trainer, which must not refuse."""
        answer = self.trainer(job, path, body)
        assert answer.status == 200, (path, answer)
        return answer.json

    def result(self, job: str, request: str) -> Any:
        """What came of a promise."""
        return self.post(job, "retrieve_future", {"request_id": request})


@contextlib.contextmanager
def serve(side: Side, folder: Path, *flags: str, ledger: str = "") -> Iterator[Service]:
    """`holdfast serve` of one side; killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    url = ledger or f"sqlite:///{folder}/ledger.db"
    words = ("-m", "holdfast", "serve", "--ledger", url, "--folder", str(folder), "--port", "0")
    with side.start(*words, *flags) as process:
        service = Service(process.child, folder)
        process.child.wait_until(service.is_ready, LIMIT_S)
        yield service
