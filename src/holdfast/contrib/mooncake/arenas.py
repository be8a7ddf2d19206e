"""Memory that is registered with Mooncake, for pointers that it reads and writes."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.contrib.mooncake.codes import word
from holdfast.errors import Unavailable
from holdfast.timeouts import Timeouts

__all__ = ["ARENA_BYTES", "Arenas"]

ARENA_BYTES = (32 << 20) + (64 << 10)
"""Two values of 16 MiB and their heads."""
MOST_ARENAS = 8


class Arenas:
    """Pieces of registered memory, kept and used again.

    Registering is slow, and so is memory that is touched for the first time, above all when
    the transport is the one who touches it. What is too large for a piece is registered for
    itself.
    """

    def __init__(self, client: Any, timeouts: Timeouts) -> None:
        self._client = client
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._free = threading.BoundedSemaphore(MOST_ARENAS)

    @contextmanager
    def take(self, nbytes: int, own: bytearray | None = None) -> Iterator[tuple[memoryview, int]]:
        """Memory for a moment, or `own` memory, registered; and its address."""
        if not self._free.acquire(timeout=self._timeouts.mooncake_buffer_s):
            raise Unavailable(f"all {MOST_ARENAS} buffers for Mooncake are in use")
        try:
            if own is not None or nbytes > ARENA_BYTES:
                memory = own if own is not None else bytearray(nbytes)
                address = self._register(memory, nbytes)
                try:
                    yield memoryview(memory), address
                finally:
                    self._client.unregister_buffer(address)
                return
            with self._lock:
                arena = self._idle.pop() if self._idle else None
            if arena is None:
                arena = mmap.mmap(-1, ARENA_BYTES)
                self._register(arena, ARENA_BYTES)
            try:
                with memoryview(arena) as view:
                    yield view, _address(arena)
            finally:
                with self._lock:
                    self._idle.append(arena)
        finally:
            self._free.release()

    def close(self) -> None:
        """Give it all back."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            self._client.unregister_buffer(_address(arena))
            arena.close()

    def _register(self, memory: bytearray | mmap.mmap, nbytes: int) -> int:
        address = _address(memory)
        if code := self._client.register_buffer(address, nbytes):
            raise Unavailable(f"Mooncake did not register {nbytes} bytes ({word(code)})")
        return address


def _address(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
