"""Trainers as processes of this machine: any command that serves HTTP.

The command hears from its environment which incarnation it is (HOLDFAST_RUN, HOLDFAST_JOB,
HOLDFAST_EPOCH, HOLDFAST_LEDGER), what gateways show it (HOLDFAST_TRAINER_SECRET), what was asked
for (HOLDFAST_SPEC, JSON), where to keep files (HOLDFAST_FOLDER) and where to listen (HOST, PORT;
`{port}` in an argument stands for it). It serves when its health path answers with 2xx. It dies
with its host. Its output goes to a file per epoch.

By default a job names one of the commands that the host was started with: whoever holds an
API key may then start jobs, but not programs of his choice.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast import proc
from holdfast.errors import HoldfastError, Mistake, TimedOut, Unavailable
from holdfast.jobs.fence import SECRET, Incarnation
from holdfast.jobs.launcher import Launcher, Running, Ticket
from holdfast.machine import begun_at, listeners, listening_users
from holdfast.proc.forkserver import ForkServer
from holdfast.timeouts import DEFAULTS

__all__ = ["LocalLauncher", "LocalProcess", "is_own", "log_file"]

_HOST = "127.0.0.1"
_LOGS = 32
"""Of how many epochs of a job the output is kept."""
_GOOD = re.compile(rb"HTTP/1\.[01] 2[0-9][0-9][ \r]")
_NO_HTTP = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)


def is_own(argv: Sequence[str]) -> bool:
    """Whether a command is Holdfast's own trainer."""
    return list(argv[:3]) == [sys.executable, "-m", "holdfast.trainer"]


def log_file(folder: Path, account: str, job: str, epoch: int) -> Path:
    """Where the output of an incarnation goes. Names have been checked: no path comes in."""
    return folder / "logs" / account / job / f"epoch-{epoch}.log"


@dataclass(eq=False)
class LocalLauncher(Launcher):
    """Starts trainers as child processes of this one."""

    trainers: Mapping[str, str]
    folder: Path
    ledger_url: str
    _: KW_ONLY
    allow_commands: InitVar[bool] = False
    health_path: str = "/api/v1/healthz"
    start_s: float = 300.0
    forks: ForkServer | None = None
    """Holdfast's own trainers are forked from it."""

    def __post_init__(self, allow_commands: bool) -> None:
        self.offers = tuple(sorted(self.trainers))
        self.any_command = allow_commands

    async def start(self, ticket: Ticket) -> Running:
        """Start the job's command on a port of its own."""
        argv = self.command(ticket.spec)
        held = proc.HeldPort(_HOST)
        port = held.port
        who = Incarnation(ticket.run, ticket.account, ticket.job, ticket.epoch, ticket.secret)
        env = {
            "HOLDFAST_RUN": ticket.run,
            "HOLDFAST_JOB": who.name,
            "HOLDFAST_EPOCH": str(ticket.epoch),
            "HOLDFAST_LEDGER": self.ledger_url,
            SECRET: ticket.secret,
            "HOLDFAST_SPEC": msgspec.json.encode(ticket.spec).decode(),
            "HOLDFAST_FOLDER": str(self.folder / "trainers"),
            "HOST": _HOST,
            "PORT": str(port),
        }
        log = log_file(self.folder, ticket.account, ticket.job, ticket.epoch)
        old = log_file(self.folder, ticket.account, ticket.job, ticket.epoch - _LOGS)
        old.unlink(missing_ok=True)
        try:
            given: Any = {"name": who.name, "env": env, "log": log}
            words = [arg.replace("{port}", str(port)) for arg in argv]
            child = await self._forked(words, given) or proc.spawn(words, **given)
        except OSError as error:  # its log cannot be written
            raise Unavailable(f"{argv[0]} could not be started: {error}") from error
        return LocalProcess(child, who, held, self.health_path, self.start_s)

    async def _forked(self, argv: Sequence[str], given: Any) -> proc.Child | None:
        if self.forks is None or not is_own(argv):
            return None
        self.forks.tend()
        until = time.monotonic() + DEFAULTS.fork_imports_s
        while self.forks.alive() and not self.forks.ready() and time.monotonic() < until:  # noqa: ASYNC110 -- a process tells nobody here
            await asyncio.sleep(DEFAULTS.process_look_s)
        return self.forks.spawn(argv, **given)

    def command(self, spec: Mapping[str, Any]) -> Sequence[str]:
        """The command that a spec asks for. `Mistake` when it may not, or there is none."""
        wish = spec.get("holdfast") or {}
        if not isinstance(wish, dict):
            raise Mistake("the field 'holdfast' of a job is an object: trainer, or command")
        if "command" in wish:
            command = wish["command"]
            if not self.any_command:
                raise Mistake(
                    "jobs may not bring their own command here: name a trainer, or start "
                    "`holdfast serve` with --allow-commands"
                )
            if not isinstance(command, list) or not all(isinstance(it, str) for it in command):
                raise Mistake("'command' is a list of texts")
            return _not_empty(command)
        name = wish.get("trainer", "default")
        if not isinstance(name, str) or name not in self.trainers:
            known = ", ".join(sorted(self.trainers)) or "none"
            raise Mistake(
                f"there is no trainer {name!r} here (there are: {known}); start `holdfast serve` "
                f"with --trainer '{name}=COMMAND'"
            )
        return _not_empty(shlex.split(self.trainers[name]))


def _not_empty(command: Sequence[str]) -> Sequence[str]:
    if not command:
        raise Mistake("a trainer's command is empty")
    return command


@dataclass(eq=False)
class LocalProcess(Running):
    """A trainer's process."""

    child: proc.Child
    who: Incarnation
    held: proc.HeldPort
    health_path: str
    start_s: float

    def __post_init__(self) -> None:
        self._port = self.held.port
        self.child.exited.add_done_callback(self._on_end)
        self._trim()

    def _trim(self) -> None:
        """Bound its log, now and then."""
        self.child.trim_log()
        self._trimming = asyncio.get_running_loop().call_later(DEFAULTS.log_trim_s, self._trim)

    def _on_end(self, _: object) -> None:
        self._trimming.cancel()
        self.held.close()

    async def serving(self) -> str:
        """Wait until the health path answers."""
        try:
            async with asyncio.timeout(self.start_s):
                # Before it is asked, too: the question carries the secret.
                while self._is_strange() or not await self._is_healthy() or self._is_strange():  # noqa: ASYNC110 -- somebody else's server
                    await asyncio.sleep(DEFAULTS.process_look_s)
        except TimeoutError:
            other = f" (another process listens at port {self._port})" * self._is_strange()
            raise TimedOut(
                f"the trainer did not answer at {self.health_path} within "
                f"{self.start_s:g} s{other}{self.child.tail()}"
            ) from None
        return f"{_HOST}:{self._port}"

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, TimeoutError, *_NO_HTTP):
            async with asyncio.timeout(DEFAULTS.health_probe_s):
                reader, writer = await asyncio.open_connection(_HOST, self._port)
                try:
                    headers = "".join(f"{k}: {v}\r\n" for k, v in self.who.headers().items())
                    writer.write(
                        f"GET {self.health_path} HTTP/1.1\r\nHost: {_HOST}\r\n"
                        f"Connection: close\r\n{headers}\r\n".encode()
                    )
                    line = await reader.readuntil(b"\r\n")
                    return _GOOD.match(line) is not None
                finally:
                    writer.close()
        return False

    def _is_strange(self) -> bool:
        """Whether another process listens there: another user's, or one that was there before.

        Root is no stranger: it listens for containers.
        """
        users = listening_users(self._port)
        if users and not users & {os.getuid(), 0}:
            return True
        ours = begun_at(self.child.pid)
        there = listeners(self._port)
        return bool(there) and all(begun_at(pid) < ours for pid in there)

    async def ended(self) -> tuple[bool, str]:
        """Wait for the process's end."""
        code = await asyncio.shield(self.child.exited)
        if code == 0:
            return True, "the trainer ended by itself"
        how = f"was killed by {_signal(-code)}" if code < 0 else f"exited with code {code}"
        return False, f"the trainer {how}{self.child.tail()}"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM if there is time for it, then SIGKILL, for the whole group."""
        if not self.child.exited.done() and grace_s > 0:
            self.child.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.child.exited)
        with contextlib.suppress(HoldfastError):
            self.child.kill_group()
        await asyncio.shield(self.child.exited)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
