"""`mooncake://` frames in a Mooncake store.

    mooncake://MASTER:PORT?metadata=http://HOST:PORT/metadata
        [&segment=0&host=127.0.0.1&buffer=64M&protocol=tcp&devices=&prefix=holdfast:
         &admin=HOST:PORT&log=ERROR]

Values live in the memory of the clients that lend some: `segment` bytes of this process,
and they are lost with it. With `segment=0`, the default, this process only reads and writes
what others hold; then another one must hold something (`mooncake_client`, or a process of
yours with a segment). `host` is the address under which the others reach this process.
`admin` is the master's metrics port; `scan` and `stat` need it.
`log` is for Mooncake's own log on stderr (INFO, WARNING, ERROR): it sets MC_LOG_LEVEL in
this process, unless you have.

How it is used: pointers and one code per key; at most 400 keys per call, because its TCP
transport fails most of a batch of thousands; every length that comes back is looked at.
Frames are never empty, which Mooncake could not store.

What it does not give, and what we make of it:

- A value that is replaced may be written over in place: whoever reads it meanwhile gets a
  mix, which the proof in `store.py` sees, so that it is read again.
- A replacement of another size first takes the old value away: until it is written, a get
  answers "failed" and `exists` says no. If there is no room for the new one, both are gone.
- It cannot compare and delete: the head is read, then the key is removed. A value that is
  put between the two is deleted as well. Do not delete by reference what somebody else
  may be replacing at that moment.
- Its own time-outs bound a call: seconds for a dead master or holder, a minute for one that
  hangs. Its master forgets everything when it dies.
"""

import contextlib
import ctypes
import http.client
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from urllib.parse import quote, urlsplit

from holdfast.errors import (
    Corrupt,
    Mistake,
    NoRoom,
    NotFound,
    Unavailable,
    UnknownOutcome,
)
from holdfast.text import parse_bytes
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.frame import ALIGN, MAX_HEAD, Ref, open_head
from holdfast.transfer.mooncake_refusal import why_refused

__all__ = ["MooncakeBackend", "from_url"]

DEFAULT_PREFIX = "holdfast:"
ARENA_BYTES = (32 << 20) + (64 << 10)
"""Two values of 16 MiB and their heads."""
MOST_ARENAS = 8
_WAIT_S = 60.0
_LOOKS = 3
_ASK_S = 5.0
_MAX_PREFIX = 256
_SIZES = {"segment": "0", "buffer": "64M"}
_OPTIONS = {
    *("metadata", "segment", "buffer", "protocol", "host", "devices", "prefix", "admin", "log"),
}

# Mooncake's numbers (mooncake-store/include/types.h).
_NO_SPACE = -200
_BAD_KEY = -400
_BAD_PARAMS = -600
_NOT_READY = -703
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
_RPC_FAILED = -900
_WORDS = {
    _NO_SPACE: "no space",
    _BAD_KEY: "not a key",
    _BAD_PARAMS: "not accepted",
    _NOT_READY: "still being written",
    -707: "the lease ended during the transfer",
    _TRANSFER_FAILED: "the transfer failed",
    _RPC_FAILED: "the master was not reached",
}


def from_url(url: str) -> "MooncakeBackend":
    """The back end that a URL names."""
    from holdfast.transfer.url import options

    found, split = options(url, _OPTIONS), urlsplit(url)
    try:
        master = (split.hostname or "", split.port or 0)
    except ValueError:
        master = ("", 0)
    if not all(master) or not found.get("metadata"):
        raise Mistake(f"{url!r}: name the master's host and port and its metadata server")
    if len(found.get("prefix", "")) > _MAX_PREFIX:
        raise Mistake(f"{url!r}: a prefix is at most {_MAX_PREFIX} characters long")
    sizes = [parse_bytes(found.get(name, size)) for name, size in _SIZES.items()]
    try:
        socket.create_connection(master, timeout=_ASK_S).close()
    except OSError as error:  # Mooncake itself would try for more than a minute
        raise Unavailable(f"no Mooncake master at {split.netloc}: {error}") from error
    client = _new_client(found.get("log", ""))
    code = client.setup(
        found.get("host", "127.0.0.1"),
        found["metadata"],
        *sizes,
        found.get("protocol", "tcp"),
        found.get("devices", ""),
        split.netloc,
    )
    if code:
        raise Unavailable(
            f"Mooncake could not start a client for the master at {split.netloc} ({_word(code)}): "
            + why_refused(found)
        )
    return MooncakeBackend(
        client,
        prefix=found.get("prefix", DEFAULT_PREFIX),
        admin=found.get("admin", ""),
        owned=True,
    )


class MooncakeBackend(Backend):
    """Frames in a Mooncake store, over a client that is set up. Does not outlive a fork.

    A client that is `owned` is closed with this.
    """

    most_keys = 400
    most_bytes = ARENA_BYTES
    parallel = 4
    gives_memory = True

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = DEFAULT_PREFIX,
        admin: str = "",
        owned: bool = False,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._admin = admin
        self._owned = owned
        self._closed = False
        self._arenas = _Arenas(client)

    def _name(self, key: str) -> str:
        return self._prefix + key

    # Put

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        total = sum(_aligned(frame.ref.nbytes) for frame in frames.values())
        with self._arenas.take(total) as (memory, address):
            names, places, sizes, at = [], [], [], 0
            for key, frame in frames.items():
                names.append(self._name(key))
                places.append(address + at)
                sizes.append(frame.ref.nbytes)
                end = at
                for part in (frame.head, *frame.parts):
                    memory[end : end + len(part)] = part
                    end += len(part)
                at += _aligned(frame.ref.nbytes)
            codes = self._client.batch_upsert_from(names, places, sizes)
        return {key: _put_error(key, code) for key, code in _each(frames, codes)}

    # Get

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys."""
        answer: dict[str, memoryview | Exception] = {}
        sizes = {key: one.nbytes for key, one in wanted.items() if isinstance(one, Ref)}
        self._get_sized(sizes, answer)
        for _ in range(_LOOKS):
            # Of a plain key nobody knows the size, nor of a value that has been replaced.
            unsure = [key for key in wanted if key not in answer]
            if not unsure:
                return answer
            self._get_sized(self._sizes(unsure, answer), answer)
        for key in wanted:
            answer.setdefault(key, Unavailable(f"{key}: changes while it is read", key=key))
        return answer

    def _get_sized(
        self, sizes: Mapping[str, int], answer: dict[str, memoryview | Exception]
    ) -> None:
        """Read values of these sizes. What is larger or not there gets no answer."""
        for some in _portions(sizes, self.most_bytes):
            total = sum(map(_aligned, some.values()))
            alone = bytearray(total) if total > ARENA_BYTES else None
            with self._arenas.take(total, alone) as (memory, address):
                starts = list(accumulate(map(_aligned, some.values()), initial=0))[:-1]
                codes = self._client.batch_get_into(
                    [self._name(key) for key in some],
                    [address + start for start in starts],
                    list(some.values()),
                )
                for (key, code), start in zip(_each(some, codes), starts, strict=True):
                    if code >= 0:
                        # It may be shorter than announced: what follows was never written.
                        found = alone or bytearray(memory[start : start + code])
                        answer[key] = memoryview(found)[:code]
                    elif code not in (_NOT_FOUND, _BAD_PARAMS):
                        answer[key] = _get_error(key, code)

    def _sizes(
        self, keys: Sequence[str], answer: dict[str, memoryview | Exception]
    ) -> dict[str, int]:
        """How large values are. What is missing or cannot be told is put into the answer."""
        if not keys:
            return {}
        names = {key: self._name(key) for key in keys}
        found = self._client.batch_get_replica_desc(list(names.values()))
        sizes = {key: size for key in keys if (size := _described(found.get(names[key])))}
        rest = [key for key in keys if key not in sizes]
        if rest:
            # The master does not say why: reading one byte does.
            with self._arenas.take(ALIGN) as (_, address):
                there = self._client.batch_get_into(
                    [names[key] for key in rest], [address] * len(rest), [1] * len(rest)
                )
            for key, code in _each(rest, there):
                if code < 0 and code != _BAD_PARAMS:  # those who are there are larger
                    answer[key] = _get_error(key, code)
        return sizes

    # The rest

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys. With a generation: look, then delete."""
        answer: dict[str, bool | Exception] = {}
        exact = [key for key, generation in wanted.items() if generation is not None]
        for key, (_, head) in self._heads(exact, answer).items():
            if head != wanted[key]:
                answer[key] = False
        doomed = [key for key in wanted if key not in answer]
        if doomed:
            # Readers have a lease; whoever loses it notices, because values are proven.
            codes = self._client.batch_remove([self._name(key) for key in doomed], True)
            for key, code in _each(doomed, codes):
                if code in (0, _NOT_FOUND):
                    answer[key] = code == 0
                elif code == _RPC_FAILED:
                    answer[key] = UnknownOutcome(f"{key}: may or may not be deleted", key=key)
                else:
                    answer[key] = _get_error(key, code)
        return answer

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        codes = self._client.batch_is_exist([self._name(key) for key in keys])
        return {
            key: code == 1 if code in (0, 1) else _get_error(key, code)
            for key, code in _each(keys, codes)
        }

    def _heads(
        self, keys: Sequence[str], answer: dict[str, Any]
    ) -> dict[str, tuple[int, int | None]]:
        """Size and generation (None: damaged) by key; what has none is put into the answer."""
        sizes = self._sizes(keys, answer)
        for key, found in list(answer.items()):
            if isinstance(found, NotFound):
                answer[key] = False
        if not sizes:
            return {}
        names = [self._name(key) for key in sizes]
        lengths = [min(size, MAX_HEAD) for size in sizes.values()]
        starts = [index * _aligned(MAX_HEAD) for index in range(len(names))]
        heads: dict[str, tuple[int, int | None]] = {}
        with self._arenas.take(len(names) * _aligned(MAX_HEAD)) as (memory, address):
            codes = self._client.get_into_ranges(
                [address],
                [names],
                [[[start] for start in starts]],
                [[[0]] * len(names)],
                [[[length] for length in lengths]],
            )
            for (key, code), start, length in zip(
                _each(sizes, codes[0]), starts, lengths, strict=True
            ):
                if code[0] == _NOT_FOUND:
                    answer[key] = False
                elif code[0] < 0:
                    answer[key] = _get_error(key, code[0])
                else:
                    generation = None
                    with contextlib.suppress(Corrupt):
                        head = bytes(memory[start : start + length])
                        generation = open_head(head, key, sizes[key]).generation
                    heads[key] = sizes[key], generation
        return heads

    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning. What is not a value of ours is left out."""
        keys = self._keys(prefix)
        for at in range(0, len(keys), self.most_keys):
            for key, (size, generation) in self._heads(keys[at : at + self.most_keys], {}).items():
                if generation is not None:
                    yield Stored(key, size, generation)

    def stat(self) -> Stat:
        """How much there is. Asks for the size of every key."""
        keys = nbytes = 0
        names = self._keys("")
        for at in range(0, len(names), self.most_keys):
            sizes = self._sizes(names[at : at + self.most_keys], {})
            keys, nbytes = keys + len(sizes), nbytes + sum(sizes.values())
        numbers = dict(
            line.rsplit(" ", 1)
            for line in self._ask_admin("/metrics").splitlines()
            if not line.startswith("#") and " " in line
        )
        taken = int(float(numbers.get("master_allocated_bytes", 0)))
        return Stat(keys, nbytes, taken, int(float(numbers.get("master_total_capacity_bytes", 0))))

    def _keys(self, prefix: str) -> list[str]:
        wanted = self._prefix + prefix
        names = self._ask_admin("/get_all_keys").splitlines()
        return [name[len(self._prefix) :] for name in names if name.startswith(wanted)]

    def _ask_admin(self, path: str) -> str:
        if not self._admin:
            raise Mistake("scan and stat need the master's metrics port: add &admin=HOST:PORT")
        connection = http.client.HTTPConnection(self._admin, timeout=_ASK_S)
        try:
            connection.request("GET", quote(path))
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                return answer.read().decode(errors="replace")
            raise Unavailable(f"the Mooncake master answered {answer.status} to {path}")
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from {self._admin}: {error}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Leave. What this process holds for others is lost."""
        if not self._closed:
            self._closed = True
            self._arenas.close()
            if self._owned:
                self._client.close()


def _new_client(log: str) -> Any:
    if log:
        os.environ.setdefault("MC_LOG_LEVEL", log)  # read once, when the library is loaded
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore()


class _Arenas:
    """Pieces of registered memory, kept and used again.

    Registering is slow, and so is memory that is touched for the first time, above all when
    the transport is the one who touches it. What is too large for a piece is registered for
    itself.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._free = threading.BoundedSemaphore(MOST_ARENAS)

    @contextmanager
    def take(self, nbytes: int, own: bytearray | None = None) -> Iterator[tuple[memoryview, int]]:
        """Memory for a moment, or `own` memory, registered; and its address."""
        if not self._free.acquire(timeout=_WAIT_S):
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
            raise Unavailable(f"Mooncake did not register {nbytes} bytes ({_word(code)})")
        return address


def _address(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _portions(sizes: Mapping[str, int], most: int) -> Iterator[dict[str, int]]:
    """The same, in parts of so many bytes at most, unless one key alone has more."""
    part: dict[str, int] = {}
    total = 0
    for key, size in sizes.items():
        if part and total + _aligned(size) > most:
            yield part
            part, total = {}, 0
        part[key] = size
        total += _aligned(size)
    if part:
        yield part


def _described(replicas: Any) -> int:
    """The size of a value by what the master says of its copies; 0: not known."""
    for replica in replicas or ():
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return 0


def _each(keys: Any, codes: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Codes by key; whoever answers with another number of them has not understood."""
    if len(codes) != len(keys):
        raise Unavailable(f"Mooncake answered with {len(codes)} codes for {len(keys)} keys")
    return zip(keys, codes, strict=True)


def _put_error(key: str, code: int) -> Exception | None:
    if code == 0:
        return None
    if code == _NO_SPACE:
        return NoRoom(
            f"{key}: no process that lends memory to this Mooncake has room for it. Lend more: "
            "&segment=4G in the URL of a process that stays",
            key=key,
        )
    if code in (_BAD_KEY, _BAD_PARAMS):
        return Mistake(f"{key}: Mooncake does not take it ({_word(code)})", key=key)
    return UnknownOutcome(f"{key}: may or may not have been put ({_word(code)})", key=key)


def _get_error(key: str, code: int) -> Exception:
    if code == _NOT_FOUND:
        return NotFound(f"{key}: nothing is there", key=key)
    return Unavailable(f"{key}: {_word(code)}", key=key)


def _word(code: int) -> str:
    return f"{_WORDS.get(code, 'Mooncake')}, code {code}"
