"""The line between a run's orchestrator and its gateway, which can be cut.

The orchestrator is told our port in place of the gateway's. Where the gateway is now, the
supervisor has written into the run's folder: with every life of the supervisor that changes.
"""

import asyncio
from pathlib import Path
from typing import Self

import msgspec

from holdfast.chaos.proxy import Proxy

__all__ = ["Line"]

_HOST = "127.0.0.1"


class _Told(msgspec.Struct):
    port: int


class Line:
    """A proxy on a port that somebody has chosen; use `async with`."""

    def __init__(self, folder: Path, port: int) -> None:
        self._told = folder / "gateway.json"
        # Nobody is at port 0: whoever comes before the gateway is turned away.
        self._proxy = Proxy(_HOST, 0, listen_host=_HOST, listen_port=port)
        self._cuts = 0

    async def __aenter__(self) -> Self:
        await self._proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._proxy.close()

    @property
    def open_connections(self) -> int:
        """How many lead through it now."""
        return self._proxy.open_connections

    def follow(self) -> None:
        """Look where the gateway is now."""
        try:
            told = msgspec.json.decode(self._told.read_bytes(), type=_Told)
        except (OSError, msgspec.MsgspecError):
            return  # it has not been told yet
        self._proxy.target = (_HOST, told.port)

    async def cut(self, length_s: float) -> None:
        """Break every connection, and let new ones hang, as where a cable is out."""
        self._cuts += 1
        self._proxy.cut("blackhole")
        try:
            await asyncio.sleep(length_s)
        finally:
            self._cuts -= 1
            if not self._cuts:
                self._proxy.heal()
