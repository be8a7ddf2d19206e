"""The line between a run's orchestrator and its gateway, which can be cut.

The orchestrator is told our port in place of the gateway's. Where the gateway is now, the
supervisor has written into the run's folder: with every life of the supervisor that changes.
"""

import asyncio
from pathlib import Path

import msgspec

from holdfast.chaos.proxy import Proxy

__all__ = ["Line"]

_HOST = "127.0.0.1"


class _Told(msgspec.Struct):
    port: int


class Line(Proxy):
    """A proxy on a port that somebody has chosen; use `async with`."""

    def __init__(self, folder: Path, port: int) -> None:
        self._told = folder / "gateway.json"
        # Nobody is at port 0: whoever comes before the gateway is turned away.
        super().__init__(_HOST, 0, listen_host=_HOST, listen_port=port)
        self._cuts = 0

    def follow(self) -> None:
        """Look where the gateway is now."""
        try:
            told = msgspec.json.decode(self._told.read_bytes(), type=_Told)
        except (OSError, msgspec.MsgspecError):
            return  # it has not been told yet
        self.target = (_HOST, told.port)

    async def cut_for(self, length_s: float) -> None:
        """Break every connection, and let new ones hang, as where a cable is out."""
        self._cuts += 1
        self.cut("blackhole")
        try:
            await asyncio.sleep(length_s)
        finally:
            self._cuts -= 1
            if not self._cuts:
                self.heal()
