"""Connections to upstreams: which of them are used again."""

import asyncio
import socket

from gateway.http.wires import HOST
from holdfast.gateway.http import Limits, Pool
from holdfast.proc import HeldPort
from patience import auntil


async def test_a_line_is_looked_at_before_it_is_used_again() -> None:
    """An upstream closes a kept line, and the event loop has not come to it yet: the kernel
    knows, so the next taker gets another line."""
    pool = Pool(Limits())
    with socket.create_server((HOST, 0)) as listener:
        address = listener.getsockname()[:2]
        line = await pool.take(address)
        theirs, _ = listener.accept()
        pool.give(line, address, reusable=True)
        assert await pool.take(address) is line  # nothing has happened: the same one
        pool.give(line, address, reusable=True)
        theirs.close()
        another = await pool.take(address)
        assert another is not line
        theirs, _ = listener.accept()
        pool.give(another, address, reusable=True)
        theirs.send(b"?")  # nobody has asked
        third = await pool.take(address)
        assert third is not another
        theirs.close()
        pool.give(third, address, reusable=False)
        await auntil(lambda: not pool.open_lines)
        pool.close()


async def test_a_connection_that_fails_gives_its_place_to_the_next() -> None:
    """Who waits for a place behind one that cannot connect hears the same, not that time is up."""
    pool = Pool(Limits(upstream_connections=1))
    with HeldPort(HOST) as nobody:
        takers = [pool.take((HOST, nobody)) for _ in range(3)]
        told = await asyncio.gather(*takers, return_exceptions=True)
    assert all("cannot be reached" in str(one) for one in told), told
