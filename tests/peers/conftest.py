"""Tests with other people's packages, in environments of their own (`make test-peers`): all in
`.venv-peers`, but for those with verifiers, whose versions exclude vLLM's.

One vLLM serves all tests of a session, because it takes 40 seconds to start. Every test
gets it resumed and with version 1 loaded; where a test has ended the engine, or left it
beyond healing, a new one is started. What the server wrote while a test ran is shown when
the test fails.
"""

import importlib.util
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.proc import Child, HeldPort, spawn

# Without vLLM this folder has no tests, unless a file is named. The other files import what is
# not there then.
collect_ignore_glob = ["test_verifiers.py"] if importlib.util.find_spec("vllm") else ["*.py"]

# Before transformers is imported: nothing here comes from a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

START_S = 240.0
MODEL = "tiny"
_LOG_CHARS = 20_000
_SHOWN: pytest.StashKey[tuple[Path, int]] = pytest.StashKey()


def command(model: Path, port: int, dtype: str) -> list[str]:
    """What starts a vLLM server on loopback."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", MODEL, "--max-model-len=256"]
    argv += ["--host=127.0.0.1", f"--port={port}", "--enforce-eager", f"--dtype={dtype}"]
    # Answers that name the version of every token.
    return [*argv, "--enable-scale-out"]


ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
"""What it needs in its environment."""
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""What spares it processes, and half of the time that it takes to start."""


class VllmProcess:
    """A vLLM server, always at the same address, that can be started again when it has died."""

    def __init__(
        self, model: Path, log: Path, *, dtype: str = "float32", env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self.child: Child | None = None
        self._held = HeldPort()
        port = self._held.port
        self.url = f"http://127.0.0.1:{port}"
        self.argv = command(model, port, dtype)
        self.env = {**ENVIRONMENT, **(env or {})}

    def start(self) -> None:
        """Start it unless it answers, and wait until it does."""
        if self.child is not None and self.child.alive() and self.healthy():
            return
        self.stop()
        self.launch()
        assert self.child is not None
        self.child.wait_until(self.healthy, START_S)

    def launch(self) -> None:
        """Start it, and do not wait."""
        self.child = spawn(self.argv, name="vLLM", env=self.env, log=self.log)

    def asked(self, path: str) -> int:
        """How often a path was asked for, by the server's own log."""
        return self.log.read_text(errors="replace").count(f"POST {path} ")

    def healthy(self) -> bool:
        """Whether it answers and its engine runs."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        """End it with everything that it started."""
        if self.child is not None:
            self.child.stop(grace_s=10)
            self.child = None


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Three versions of one model, by number."""
    from peers.tiny_model import make_model

    root = tmp_path_factory.mktemp("channel")
    return {number: make_model(root / f"step_{number}", seed=number) for number in (1, 2, 3)}


@pytest.fixture(scope="session")
def vllm_process(
    models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    process = VllmProcess(models[1], tmp_path_factory.mktemp("vllm") / "vllm.log")
    yield process
    process.stop()


@pytest.fixture
async def vllm(
    vllm_process: VllmProcess, models: dict[int, Path], request: pytest.FixtureRequest
) -> AsyncIterator[Any]:
    """A client of the server, which serves version 1."""
    from holdfast.contrib.vllm.client import VllmServer
    from holdfast.errors import Corrupt

    log = vllm_process.log
    request.node.stash[_SHOWN] = (log, log.stat().st_size if log.exists() else 0)
    for _ in range(2):
        vllm_process.start()
        async with VllmServer(vllm_process.url, call_s=30) as server:
            await server.pause("abort")
            try:
                await server.reload(str(models[1]))
            except Corrupt:  # the test before left it beyond healing
                vllm_process.stop()
                continue
            await server.set_version(1)
            await server.resume()
            yield server
            return
    pytest.fail("a new server could not load version 1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show what the server wrote while a failed test ran."""
    report = yield
    if report.failed and _SHOWN in item.stash:
        log, begin = item.stash[_SHOWN]
        if log.exists():
            told = log.read_bytes()[begin:].decode(errors="replace")[-_LOG_CHARS:]
            report.sections.append((f"{log.name} during this test", told))
    return report
