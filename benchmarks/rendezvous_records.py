"""Reading what 10,000 participants have said: the ledger's records, and TCPStore's keys.

Both hold the same bytes. Ours are read as the closer reads them, in one range, and decoded into
a `Board`; TCPStore's with one `multi_get`, and not decoded. TCPStore's server and client are
processes of their own, so that ours has no torch in it, as an agent has none.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

from holdfast import ledger, proc
from holdfast.ledger import Ledger
from holdfast.ledger.records import encode, put
from holdfast.rendezvous.board import Board
from holdfast.rendezvous.records import Keys, Node

KEYS = Keys("bench")
_PER_TXN = 100

_SERVER = """\
import sys, torch.distributed as dist
host = dist.TCPStore("127.0.0.1", {port}, None, True, use_libuv={libuv}, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""
_CLIENT = """\
import json, sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, None, False, use_libuv={libuv})
values = json.loads(sys.stdin.readline())
for key, value in values.items():
    store.set(key, value)
keys = list(values)
print("ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    found = store.multi_get(keys)
    print(time.perf_counter() - began, flush=True)
    assert len(found) == len(keys)
"""


class Store:
    """A TCPStore that holds the same, and a client of it. Use `with`."""

    def __init__(self, nodes: dict[str, Node], *, libuv: bool) -> None:
        self._stack = contextlib.ExitStack()
        port = self._stack.enter_context(proc.HeldPort())
        self._start(_SERVER.format(port=port, libuv=libuv))
        values = {KEYS.node(name): encode(node).decode() for name, node in nodes.items()}
        self._client = self._start(
            _CLIENT.format(port=port, libuv=libuv), json.dumps(values).encode()
        )

    def _start(self, code: str, first: bytes = b"") -> proc.Child:
        child = self._stack.enter_context(
            proc.spawn([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert child.process.stdout is not None
        if first:
            self._tell(child, first)
        child.process.stdout.readline()
        return child

    def _tell(self, child: proc.Child, line: bytes) -> None:
        assert child.process.stdin is not None
        child.process.stdin.write(line + b"\n")
        child.process.stdin.flush()

    def read(self) -> float:
        """Seconds of one `multi_get` of everything."""
        self._tell(self._client, b"again")
        assert self._client.process.stdout is not None
        return float(self._client.process.stdout.readline())

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def records(count: int) -> dict[str, Node]:
    """The participants, by name."""
    return {
        f"node-{index}": Node(
            cycle=1, address="127.0.0.1", port=29500, slots=8, infra_rank=index, host="host/1/2"
        )
        for index in range(count)
    }


async def fill(led: Ledger, nodes: dict[str, Node]) -> None:
    """Write everybody's record, as many per transaction as fit."""
    puts = [put(KEYS.node(name), node) for name, node in nodes.items()]
    for first in range(0, len(puts), _PER_TXN):
        await led.txn([], puts[first : first + _PER_TXN])


async def read_all(urls: dict[str, str], count: int, turns: int) -> dict[str, list[float]]:
    """Seconds per reading, by contender, taking turns."""
    nodes = records(count)
    found: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        ledgers = {}
        for name, url in urls.items():
            ledgers[name] = await stack.enter_async_context(ledger.open(url))
            await fill(ledgers[name], nodes)
        stores = {
            "TCPStore, libuv": stack.enter_context(Store(nodes, libuv=True)),
            "TCPStore, legacy": stack.enter_context(Store(nodes, libuv=False)),
        }
        for turn in range(turns + 1):  # the first is only to warm up
            for name, led in ledgers.items():
                began = time.perf_counter()
                board = Board(KEYS, (await led.range(KEYS.nodes)).entries)
                took = time.perf_counter() - began
                assert len(board.nodes) == count
                if turn:
                    found.setdefault(name, []).append(took)
            for name, store in stores.items():
                took = await asyncio.to_thread(store.read)
                if turn:
                    found.setdefault(name, []).append(took)
    return found


def at(path: str | Path) -> str:
    """A ledger's URL."""
    return f"sqlite:///{path}/records.db"
