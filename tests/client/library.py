"""A client library in a process of its own environment (scripts/setup-sdks)."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.proc import Child, spawn

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sdks/bin/python"


class Process:
    """It does what it is told, line by line: see `sdk_program`."""

    def __init__(self, child: Child) -> None:
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        self._stdin, self._stdout = child.process.stdin, child.process.stdout

    def do(self, what: str, **how: Any) -> dict[str, Any]:
        """Tell it to do something; the answer has `ok` or `error`."""
        self._stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
        self._stdin.flush()
        line = self._stdout.readline()
        assert line, "the library's process has ended"
        said: dict[str, Any] = json.loads(line)
        return said


@contextlib.contextmanager
def started(name: str, base_model: str = "holdfast/counting") -> Iterator[Process]:
    """The library of that name, which trains a model of that base."""
    argv = [str(PYTHON), str(ROOT / "tests/client/sdk_program.py"), name]
    env = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "BASE_MODEL": base_model}
    with spawn(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield Process(child)
