"""A trainer as users have it: `holdfast serve`, a job, and the real Tinker client in a program.

    with house(tmp_path) as there:
        lines = there.run(PROGRAM)

A program runs in the environment of the client libraries. It finds `service` (a
`tinker.ServiceClient`), `types`, `encode`, `decode`, `datum` and `say` (one JSON line per call).
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.service import Service, serve
from holdfast import ledger
from patience import HANG_S, until

SDKS = Path(__file__).parents[2] / ".venv-sdks" / "bin" / "python"
JOB = "one"
START_S = 90.0
PRELUDE = """
import json, os, sys, time
import tinker
from tinker import types
service = tinker.ServiceClient(base_url=os.environ["HOUSE_URL"], api_key=os.environ["HOUSE_KEY"])
BASE = "holdfast/tiny"
CHARACTERS = "".join(map(chr, range(32, 127)))
FIRST, END = 6, 2  # the tiny model has four specials, tab and newline before its characters
def say(**what):
    print(json.dumps(what), flush=True)
def encode(text):
    return [FIRST + CHARACTERS.index(one) for one in text]
def decode(tokens):
    known = range(FIRST, FIRST + len(CHARACTERS))
    return "".join(CHARACTERS[one - FIRST] for one in tokens if one in known)
def datum(text, types=types):
    ids = [1, *encode(text), END]
    count = len(ids) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[count]),
            "weights": types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
        },
    )
"""


# The client's own threads, which are not Python's, may crash an interpreter that is ending.
END = "\nsys.stdout.flush()\nos._exit(0)\n"


class Program:
    """A client's program that runs."""

    def __init__(self, child: "subprocess.Popen[str]", errors: Path) -> None:
        self._child = child
        self._errors = errors
        self.lines: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self._child.stdout is not None
        text = self._child.stdout.readline()
        assert text, f"the program ended with {self._child.wait(HANG_S)}:\n{self.errors()}"
        self.lines.append(json.loads(text))
        return self.lines[-1]

    def finish(self, limit_s: float = 120.0) -> list[dict[str, Any]]:
        """Wait for its end; everything that it said."""
        rest, _ = self._child.communicate(timeout=limit_s)
        self.lines += [json.loads(line) for line in rest.splitlines()]
        assert self._child.returncode == 0, self.errors()
        return self.lines

    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._errors.read_text()[-6000:]

    def end(self) -> None:
        """Stop it, whatever it does."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.communicate()


class House:
    """A service with one job, trained by Holdfast's own trainer."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.folder = service.folder

    @contextlib.contextmanager
    def program(self, text: str, **env: str) -> Iterator[Program]:
        """Start a client's program."""
        if not SDKS.exists():
            pytest.fail(f"{SDKS} is missing: make setup-sdks")
        errors = Path(tempfile.mkstemp(dir=self.folder, prefix="program-")[1])
        with errors.open("w") as sink:
            child = subprocess.Popen(
                [SDKS, "-c", PRELUDE + text + END],
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env={
                    **os.environ,
                    "HOUSE_URL": self.service.url + self.service.way(JOB, ""),
                    "HOUSE_KEY": self.service.key,
                    "TINKER_TELEMETRY": "0",
                    "HF_HUB_OFFLINE": "1",
                    **env,
                },
            )
        program = Program(child, errors)
        try:
            yield program
        finally:
            program.end()

    def run(self, text: str, limit_s: float = 120.0, **env: str) -> list[dict[str, Any]]:
        """Run a client's program to its end; what it said."""
        with self.program(text, **env) as program:
            return program.finish(limit_s)

    def kill_trainer(self) -> int:
        """SIGKILL for rank 0, or for whichever process the control plane has started."""
        return self.service.kill("holdfast.trainer")

    def epoch(self) -> int:
        """How many incarnations there were."""
        return int(self.service.ask("GET", self.service.jobs(JOB)).json.get("epoch", 0))

    def models(self) -> dict[str, int]:
        """How many models there are, and where, as the trainer tells it."""
        way = self.service.way(JOB, "/api/v1/healthz")
        found: dict[str, int] = self.service.ask("GET", way).json["models"]
        return found

    def log(self) -> str:
        """What the trainers wrote."""
        logs = sorted((self.folder / "logs" / "local" / JOB).glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in logs)

    async def content(self, channel: str) -> str:
        """The hash of the newest weights of a channel."""
        async with ledger.open(f"sqlite:///{self.folder}/ledger.db") as opened:
            entry = await opened.get(f"/runs/default/weights/{channel}/live/head")
        assert entry is not None, f"nothing was published in {channel}"
        content: str = json.loads(entry.value)["content"]
        return content


@contextlib.contextmanager
def house(
    folder: Path, *flags: str, policy: dict[str, Any] | None = None, ledger: str | None = None
) -> Iterator[House]:
    """`holdfast serve` with Holdfast's trainer, and a job that runs."""
    began = time.monotonic()
    with serve(folder, *flags, trainer="holdfast", ledger=ledger) as service:
        service.create(JOB, {"holdfast": {"policy": policy or {}}})
        there = House(service)
        try:
            until(lambda: service.state(JOB) == "RUNNING", "the job runs", START_S)
        except AssertionError:
            pytest.fail(f"no trainer after {time.monotonic() - began:.0f} s:\n{there.log()}")
        yield there


__all__ = ["JOB", "PRELUDE", "SDKS", "House", "Program", "house"]
