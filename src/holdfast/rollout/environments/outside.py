"""An environment in a process of its own, which is killed when it hangs and replaced when it died.

Invariants:

- A question has its own answer, an error, or `Spoilt` within its limit. After a question that was
  not answered the process is gone, so no late answer is ever taken for another's.
- What the environment raises costs nothing but the question. What kills or hangs its process
  costs the question and a new process.
- An environment that has never loaded is a mistake of the configuration. One that has loaded
  before and does not now is `Spoilt`.
- The process dies with the thread that first asked, and with `close`.

One question at a time; the wait for one's turn is not counted.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from holdfast import errors
from holdfast.errors import Mistake, TimedOut
from holdfast.proc import Child, spawn
from holdfast.rollout.environments.base import Limits, Spoilt
from holdfast.rollout.environments.wire import MAX_LINE_BYTES, Answer, Ask, AskLoad, Question
from holdfast.timeouts import DEFAULTS

__all__ = ["Outside"]

_T = TypeVar("_T")


class Outside:
    """Somebody's environment, at arm's length."""

    def __init__(self, name: str, options: Mapping[str, Any], limit_s: float) -> None:
        self._name = name
        self._options = dict(options)
        self._limit_s = limit_s
        self._lock = asyncio.Lock()
        self._process: _Process | None = None
        self._limits: Limits | None = None
        self._closed = False

    async def ask(self, ask: Ask, kind: type[_T]) -> _T:
        """The answer, of this type."""
        async with self._lock:
            process = await self._ready()
            return await self._exchange(process, ask, kind, self._limit_s)

    async def limits(self) -> Limits:
        """What the environment says of itself."""
        async with self._lock:
            await self._ready()
        assert self._limits is not None
        return self._limits

    async def close(self) -> None:
        """End the process, also under a question that is being asked."""
        self._closed = True
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    async def _ready(self) -> "_Process":
        if self._closed:
            raise Mistake(f"environment {self._name} was closed")
        if self._process is not None:
            return self._process
        self._process = process = await _Process.start(self._name)
        load = AskLoad(self._name, self._options)
        try:
            self._limits = await self._exchange(process, load, Limits, DEFAULTS.environment_load_s)
        except (Mistake, Spoilt) as error:
            self._drop(process)
            if self._limits is not None:
                raise Spoilt(f"environment {self._name} did not load again: {error}") from None
            if isinstance(error, Spoilt):
                raise Mistake(f"environment {self._name} does not load: {error}") from None
            raise
        return process

    async def _exchange(
        self, process: "_Process", ask: AskLoad | Ask, kind: type[_T], limit_s: float
    ) -> _T:
        try:
            question = process.encoded(ask)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise Spoilt(f"the environment cannot be asked: {error}") from None
        try:
            async with asyncio.timeout(limit_s):
                said = await process.exchange(question)
            result = msgspec.json.decode(said.result, type=kind) if said.error is None else None
        except TimeoutError:
            self._drop(process)
            raise Spoilt(f"the environment did not answer within {limit_s:g} s") from None
        except (EOFError, OSError):
            code = self._drop(process)
            raise Spoilt(f"the environment's process ended with code {code}") from None
        except (msgspec.MsgspecError, ValueError) as error:
            self._drop(process)
            raise Spoilt(f"the environment's process gave no proper answer: {error}") from None
        except BaseException:  # cancelled: the answer would be the next question's
            self._drop(process)
            raise
        if said.error is not None:
            raise _error(said)
        return result  # type: ignore[return-value]  # there is one, if there is no error

    def _drop(self, process: "_Process") -> int:
        if self._process is process:
            self._process = None
        return process.kill()


class _Process:
    """A running `child.py` and the line to it."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child = child
        self._reader = reader
        self._writer = writer
        self._number = 0

    @classmethod
    async def start(cls, name: str) -> "_Process":
        """Start it from this thread, with which it dies."""
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "holdfast.rollout.environments.child"]
        try:
            with theirs:
                child = spawn(argv, name=name, stdin=theirs.fileno(), stdout=theirs.fileno())
        except BaseException:
            ours.close()
            raise
        try:
            return cls(child, *await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES))
        except BaseException:
            ours.close()
            child.kill_group()
            raise

    def encoded(self, ask: AskLoad | Ask) -> bytes:
        """The next question, as a line."""
        data = msgspec.json.encode(Question(self._number + 1, ask)) + b"\n"
        if len(data) > MAX_LINE_BYTES:
            raise ValueError(f"the question is larger than {MAX_LINE_BYTES >> 20} MiB")
        self._number += 1
        return data

    async def exchange(self, question: bytes) -> Answer:
        """Send it, and read what comes back."""
        self._writer.write(question)
        await self._writer.drain()
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer = msgspec.json.decode(line, type=Answer)
        if answer.number != self._number:
            raise ValueError(f"answer {answer.number} to question {self._number}")
        return answer

    def kill(self) -> int:
        """Kill its whole group; return the code that it ended with."""
        self._writer.close()
        self.child.kill_group()
        return self.child.process.returncode

    async def end(self) -> None:
        """Let it end by itself, for a moment."""
        self._writer.close()
        with contextlib.suppress(TimedOut):
            await asyncio.to_thread(self.child.wait, DEFAULTS.environment_end_s)
        self.child.kill_group()


def _error(said: Answer) -> Mistake | Spoilt:
    if said.mistake is None:
        return Spoilt(str(said.error))
    found = getattr(errors, said.mistake, Mistake)
    wanted = found if isinstance(found, type) and issubclass(found, Mistake) else Mistake
    return wanted(str(said.error))
