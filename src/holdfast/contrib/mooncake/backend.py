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
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from holdfast.contrib.mooncake.arenas import ARENA_BYTES, Arenas
from holdfast.contrib.mooncake.codes import (
    BAD_PARAMS,
    NOT_FOUND,
    RPC_FAILED,
    get_error,
    put_error,
    word,
)
from holdfast.contrib.mooncake.refusal import why_refused
from holdfast.errors import Corrupt, Mistake, NotFound, Unavailable, UnknownOutcome
from holdfast.fetch import fetch
from holdfast.text import parse_bytes
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.batches import portions, split
from holdfast.transfer.frame import ALIGN, MAX_HEAD, Ref, aligned, open_head
from holdfast.transfer.url import options

__all__ = ["MooncakeBackend", "from_url"]

DEFAULT_PREFIX = "holdfast:"
_LOOKS = 3
_MAX_PREFIX = 256
_SIZES = {"segment": "0", "buffer": "64M"}
_OPTIONS = {
    *("metadata", "segment", "buffer", "protocol", "host", "devices", "prefix", "admin", "log"),
}


def from_url(url: str, timeouts: Timeouts = DEFAULTS) -> "MooncakeBackend":
    """The back end that a URL names."""
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
        socket.create_connection(master, timeout=timeouts.store_call_s).close()
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
            f"Mooncake could not start a client for the master at {split.netloc} ({word(code)}): "
            + why_refused(found, timeouts.store_call_s)
        )
    return MooncakeBackend(
        client,
        prefix=found.get("prefix", DEFAULT_PREFIX),
        admin=found.get("admin", ""),
        owned=True,
        timeouts=timeouts,
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
        timeouts: Timeouts = DEFAULTS,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._admin = admin
        self._owned = owned
        self._closed = False
        self._limit_s = timeouts.store_call_s
        self._arenas = Arenas(client, timeouts)

    def _name(self, key: str) -> str:
        return self._prefix + key

    # Put

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        sizes = [frame.ref.nbytes for frame in frames.values()]
        *starts, total = accumulate(map(aligned, sizes), initial=0)
        with self._arenas.take(total) as (memory, address):
            for at, frame in zip(starts, frames.values(), strict=True):
                end = at
                for part in (frame.head, *frame.parts):
                    memory[end : end + len(part)] = part
                    end += len(part)
            names, places = map(self._name, frames), (address + start for start in starts)
            codes = self._client.batch_upsert_from(list(names), list(places), sizes)
        return {key: put_error(key, code) for key, code in _each(frames, codes)}

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
        for some in split(sizes, aligned, len(sizes), self.most_bytes) if sizes else ():
            *starts, total = accumulate(map(aligned, some.values()), initial=0)
            alone = bytearray(total) if total > ARENA_BYTES else None
            with self._arenas.take(total, alone) as (memory, address):
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
                    elif code not in (NOT_FOUND, BAD_PARAMS):
                        answer[key] = get_error(key, code)

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
                if code < 0 and code != BAD_PARAMS:  # those who are there are larger
                    answer[key] = get_error(key, code)
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
                if code in (0, NOT_FOUND):
                    answer[key] = code == 0
                elif code == RPC_FAILED:
                    answer[key] = UnknownOutcome(f"{key}: may or may not be deleted", key=key)
                else:
                    answer[key] = get_error(key, code)
        return answer

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        codes = self._client.batch_is_exist([self._name(key) for key in keys])
        return {
            key: code == 1 if code in (0, 1) else get_error(key, code)
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
        starts = [index * aligned(MAX_HEAD) for index in range(len(names))]
        heads: dict[str, tuple[int, int | None]] = {}
        with self._arenas.take(len(names) * aligned(MAX_HEAD)) as (memory, address):
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
                if code[0] == NOT_FOUND:
                    answer[key] = False
                elif code[0] < 0:
                    answer[key] = get_error(key, code[0])
                else:
                    generation = None
                    with contextlib.suppress(Corrupt):
                        head = bytes(memory[start : start + length])
                        generation = open_head(head, key, sizes[key]).generation
                    heads[key] = sizes[key], generation
        return heads

    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning. What is not a value of ours is left out."""
        for keys in portions(self._keys(prefix), self.most_keys):
            for key, (size, generation) in self._heads(keys, {}).items():
                if generation is not None:
                    yield Stored(key, size, generation)

    def stat(self) -> Stat:
        """How much there is. Asks for the size of every key."""
        keys = nbytes = 0
        for names in portions(self._keys(""), self.most_keys):
            sizes = self._sizes(names, {})
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
        status, body = fetch("GET", f"http://{self._admin}{path}", timeout_s=self._limit_s)
        if status != HTTPStatus.OK:
            raise Unavailable(f"the Mooncake master answered {status} to {path}")
        return body.decode(errors="replace")

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
