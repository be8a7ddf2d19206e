"""A vLLM server of our own: started, ended with whatever it started, started again.

    process = ServerProcess([*"vllm serve MODEL --port 8000".split()], log=Path("vllm.log"))
    await serve_vllm(root, ledger, "policy", "r0", "http://127.0.0.1:8000", process=process)

vLLM is several processes (API server, EngineCore, workers). When the first is killed the
others stay, with the memory that the next server needs. Here they are one process group, led
by a small keeper (`holdfast.proc.keeper`) that starts the server and ends the group when the
server has ended.

Invariants:

- Whoever is killed, none of the group is left, be it the server (the keeper ends the group),
  the keeper (we do), or we (the kernel tells the keeper). Only what left the group by itself
  stays; vLLM does not.
- Nor are its sockets left, or its shared memory unless the keeper itself is killed: a killed
  vLLM cannot remove them. They are in a folder for each life (`VLLM_RPC_BASE_PATH`), and what
  processes of the group have mapped under the names that Python gives. A semaphore of 32 bytes
  stays in `/dev/shm`: nobody has it open, so nothing says whose it is.
- A server that keeps ending is started ever more slowly.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from holdfast import events
from holdfast.errors import MissingPackage, TimedOut
from holdfast.proc import Child, spawn
from holdfast.proc import keeper as keeper_module
from holdfast.proc.restarts import Death, RestartPolicy, Restarts
from holdfast.timeouts import DEFAULTS

__all__ = ["ServerProcess"]

_NAME = "vLLM"
_POLICY = RestartPolicy(
    well_s=DEFAULTS.server_well_s, first_s=1.0, most_s=DEFAULTS.server_pause_s, failures=0
)
"""A server is never given up: what it lacks may come."""


class ServerEnded(events.Event, frozen=True, tag="weights.server_ended"):
    """A server of ours has ended, and what was left of it was killed."""

    name: str
    ran_s: float


class ServerProcess:
    """Keeps one server running. Its address must be in `argv`, and always the same.

    `env` is added to our environment, and `VLLM_SERVER_DEV_MODE=1`, which the weights need.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        if shutil.which(argv[0]) is None:
            raise MissingPackage(f"the program {argv[0]} was not found (install the package vllm)")
        self._argv = list(argv)
        self._env = {"VLLM_SERVER_DEV_MODE": "1", **(env or {})}
        self._log = log
        self._child: Child | None = None

    @contextlib.asynccontextmanager
    async def running(self, ended: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Keep it running meanwhile; `ended` is called whenever it has ended.

        To be used in a thread that lives as long as the server should.
        """
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._run(ended), name=f"{_NAME} runs")
                yield
                task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, ended: Callable[[], None]) -> None:
        restarts = Restarts(_POLICY)
        while True:
            begun_s = time.monotonic()
            place = tempfile.mkdtemp(prefix="holdfast-vllm-")
            keeper = [sys.executable, "-I", keeper_module.__file__, str(os.getpid()), place]
            env = {**self._env, "VLLM_RPC_BASE_PATH": place}
            try:
                self._child = spawn([*keeper, *self._argv], name=_NAME, env=env, log=self._log)
                code = await asyncio.shield(self._child.exited)
            finally:
                self.end()
                shutil.rmtree(place, ignore_errors=True)
            ran_s = time.monotonic() - begun_s
            events.emit(ServerEnded(name=_NAME, ran_s=ran_s))
            ended()
            await asyncio.sleep(restarts.died(Death(ran_s, code)) or 0.0)

    def end(self) -> None:
        """Kill the server with all that it started. While `running` it is started again."""
        if self._child is None:
            return
        if self._child.alive():
            os.kill(self._child.pid, signal.SIGHUP)
            with contextlib.suppress(TimedOut):  # the keeper is stopped, or very slow
                self._child.wait(DEFAULTS.keeper_end_s)
        self._child.kill_group()
