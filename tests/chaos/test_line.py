"""The line between a run's orchestrator and its gateway: real sockets, cut and healed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.chaos.line import Line
from holdfast.proc import HeldPort

from .wires import LIMIT_S, Server


def tell(folder: Path, port: int) -> None:
    (folder / "gateway.json").write_bytes(msgspec.json.encode({"port": port}))


@pytest.fixture
def port() -> Iterator[int]:
    with HeldPort() as held:
        yield held


@pytest.fixture
async def line(tmp_path: Path, port: int) -> AsyncIterator[Line]:
    async with Line(tmp_path, port) as found:
        yield found


async def said(port: int) -> bytes:
    """What is said to somebody who comes; nothing if the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read(100)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_it_leads_to_the_gateway_of_now(line: Line, tmp_path: Path, port: int) -> None:
    """Before there is a gateway nobody is served; then whoever comes reaches the newest one,
    whatever half a file says meanwhile."""
    line.follow()
    assert await said(port) == b""
    async with Server(answer=b"one").running() as one, Server(answer=b"two").running() as two:
        for gateway, name in ((one, b"one"), (two, b"two")):
            tell(tmp_path, gateway)
            line.follow()
            assert await said(port) == name
        (tmp_path / "gateway.json").write_text('{"port": ')
        line.follow()
        assert await said(port) == b"two"


async def test_two_cuts_at_once_last_as_long_as_the_longer(
    line: Line, tmp_path: Path, port: int
) -> None:
    """An open connection is reset, a new one hangs: the end of the shorter cut does not heal the
    longer one. The connection that hangs is served when that is healed."""
    async with Server(answer=b"one").running() as gateway, asyncio.timeout(LIMIT_S):
        tell(tmp_path, gateway)
        line.follow()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read(100) == b"one"
        longer = asyncio.create_task(line.cut_for(1.0))
        await line.cut_for(0.1)
        with pytest.raises(ConnectionResetError):
            await reader.read(100)
        writer.close()
        late = asyncio.create_task(said(port))
        assert await asyncio.wait({late}, timeout=0.4) == (set(), {late})
        assert not longer.done()
        assert await late == b"one"
