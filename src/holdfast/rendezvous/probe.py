"""Probes: whether a node's agent is there, and is reached at the address that it gives.

Every agent answers on a port of its own, at the node's address, with a digest of the run's name
and its own. So a probe tells the node from any other program: an address such as 127.0.0.1 leads
every machine to itself. Nothing is read from the caller, and the answer is no secret.

Two questions are answered by probes:

- a member asks whether it reaches rank 0 (`trouble`), and reports in its record if it does not;
- a node that finds its name taken asks whether the holder lives (`is_alive`).
"""

import asyncio
import contextlib
import hashlib
import os
from typing import Self

from holdfast.machine import begun_at
from holdfast.rendezvous.address import listen
from holdfast.rendezvous.records import Node
from holdfast.timeouts import DEFAULTS

__all__ = ["ProbeServer", "is_alive", "trouble"]


class ProbeServer:
    """Answers probes of one node. Use `async with`; or `close` it."""

    def __init__(self, address: str, run: str, name: str) -> None:
        self._socket = listen(address)
        self._answer = _digest(run, name)
        self._server: asyncio.Server | None = None
        self.port: int = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Answer from now on."""
        self._server = await asyncio.start_server(self._greet, sock=self._socket)

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._answer)
            await writer.drain()
        writer.close()

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def trouble(
    address: str,
    port: int,
    run: str,
    name: str,
    *,
    limit_s: float = DEFAULTS.node_probe_s,
    refused_s: float = DEFAULTS.node_refused_s,
) -> str:
    """Why a node is not reached; empty: it is.

    A refusal is believed early: an agent answers before it tells its port to anybody.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    why = "no answer"
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    if await _ask(address, port) == _digest(run, name):
                        return ""
                    why = "another program answers there"
                except OSError as error:
                    why = os.strerror(error.errno) if error.errno else str(error)
                if loop.time() - began >= refused_s:
                    break
                await asyncio.sleep(DEFAULTS.node_probe_pause_s)
    except TimeoutError:
        pass
    return f"{name} is not reached at {address}:{port}: {why}"


async def is_alive(run: str, name: str, other: Node, own: Node) -> bool | None:
    """Whether the node that holds a name lives; None: that is not known.

    `own` is this node's own record: an earlier life of the same agent counts as dead.
    """
    if other.host == own.host:
        if other.pid == own.pid and other.probe_port == own.probe_port:
            return False
        if not begun_at(other.pid):
            return False
    if not other.probe_port:
        return None
    why = await trouble(other.address, other.probe_port, run, name, limit_s=1.0, refused_s=0.0)
    return None if why else True


async def _ask(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        return await reader.read(64)
    finally:
        writer.close()


def _digest(run: str, name: str) -> bytes:
    return hashlib.sha256(f"{run}/{name}".encode()).hexdigest()[:32].encode()
