"""`redis://` frames in a Redis server.

    redis://[user:password@]host:port[/db][?prefix=holdfast:&timeout=5&verify=put&ca=FILE]
    rediss://...                  the same, encrypted

Every key begins with `prefix`. A frame of up to 32 MiB is a plain string. A larger one is
a hash of parts (`redis_parts.py`). It is written under a name of its own, which expires, and
then takes the place of the old value in one step: a reader sees the old one or the new one,
and what a killed writer leaves behind goes away by itself. A reader fetches part by part; if
the value is replaced meanwhile, a part is missing or the proof of the whole fails, and it is
read again.

A put is answered for when the server has answered; how durable that is, is up to the
server (with `appendfsync always` it survives kill -9). A put whose answer was lost is
`UnknownOutcome`, and cannot come true later over a newer value: see `redis_pool.py`. With
`verify=put` everything that was put is read back and proven before it counts.

One server, or the primary of several; not Redis Cluster.
"""

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from holdfast.errors import (
    Corrupt,
    Gone,
    HoldfastError,
    Mistake,
    NoRoom,
    NotFound,
    Unavailable,
    UnknownOutcome,
)
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.frame import BORN_AT, MAX_HEAD, Buffer, Ref, open_head, prove
from holdfast.transfer.redis_parts import ABOUT, described, pieces_of, read_parts, write_fields
from holdfast.transfer.redis_pool import Pool
from holdfast.transfer.resp import Address, Answer, Lost, Refused, Wire, command, refusal
from holdfast.transfer.url import options, without_password

__all__ = ["PART_BYTES", "RedisBackend", "from_url"]

V = TypeVar("V")

PART_BYTES = 32 << 20
"""Larger frames are kept in parts of this size."""
DEFAULT_PREFIX = "holdfast:"
_SCAN_COUNT = 1000
_FIRST_KEYS = 128
_MAX_PREFIX = 256
_OPTIONS = {"prefix", "timeout", "verify", "ca"}

_DELETE = f"""
local gone = {{}}
for i, key in ipairs(KEYS) do
  local kind, found = redis.call('TYPE', key).ok, ''
  if kind == 'string' then
    found = redis.call('GETRANGE', key, {BORN_AT}, {BORN_AT + 7})
  elseif kind == 'hash' then
    found = redis.call('HGET', key, '0') or ''
    found = string.sub(found, {BORN_AT + 1}, {BORN_AT + 8})
  end
  gone[i] = found == ARGV[i] and redis.call('UNLINK', key) or 0
end
return gone
"""
"""Delete keys that have these generations."""

_FINISH = """
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
redis.call('PERSIST', KEYS[1])
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
"""
"""Put what was written part by part in its place, if it is still all there."""


def from_url(url: str, timeouts: Timeouts = DEFAULTS) -> "RedisBackend":
    """The back end that a URL names."""
    shown = without_password(url)
    split, found = urlsplit(url), options(url, _OPTIONS)
    path = split.path.strip("/")
    try:
        port, db = split.port or 6379, int(path or 0)
        timeout_s = float(found.get("timeout", timeouts.store_call_s))
    except ValueError:
        raise Mistake(f"{shown!r}: port, database and timeout are numbers") from None
    if not 0 < timeout_s <= 3600 or not math.isfinite(timeout_s):
        raise Mistake(f"{shown!r}: timeout is a number of seconds, above 0, at most 3600")
    if found.get("verify", "put") != "put":
        raise Mistake(f"{shown!r}: all that can be verified by reading back is verify=put")
    address = Address(
        split.hostname or "127.0.0.1",
        port,
        unquote(split.username or ""),
        unquote(split.password or ""),
        db,
        split.scheme == "rediss",
        found.get("ca", ""),
    )
    return RedisBackend(
        address,
        prefix=found.get("prefix", DEFAULT_PREFIX),
        timeout_s=timeout_s,
        verify="verify" in found,
        keep_s=timeouts.redis_unfinished_s,
    )


class RedisBackend(Backend):
    """Frames in a Redis server."""

    most_keys = 5_000
    most_bytes = (32 << 20) + (64 << 10)
    parallel = 4
    gives_memory = True

    def __init__(
        self,
        address: Address,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = DEFAULTS.store_call_s,
        verify: bool = False,
        part_bytes: int = PART_BYTES,
        keep_s: float = DEFAULTS.redis_unfinished_s,
    ) -> None:
        """`keep_s` is how long a large value may wait for its next part."""
        if len(prefix) > _MAX_PREFIX or not prefix.isprintable():
            raise Mistake(f"a prefix is printable and at most {_MAX_PREFIX} long, not {prefix!r}")
        self._pool = Pool(address, timeout_s)
        self._prefix = prefix.encode()
        self._verify = verify
        self._part_bytes = part_bytes
        self._keep_s = keep_s

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    # Put

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        small = {k: f for k, f in frames.items() if f.ref.nbytes <= self._part_bytes}
        answer: dict[str, Exception | None] = {}
        if small:
            answer.update(self._changed(small, "have been put", partial(self._put_small, small)))
        for key, frame in frames.items():
            if key not in small:
                answer.update(self._put_large(key, frame))
        if self._verify:
            self._prove(frames, answer)
        return answer

    def _put_small(
        self, frames: Mapping[str, Frame], wire: Wire
    ) -> Mapping[str, Exception | None]:
        parts: list[Buffer] = [b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(frames) + 1)]
        for key, frame in frames.items():
            name = self._name(key)
            size = frame.ref.nbytes
            parts.append(b"$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, size, frame.head))
            parts += frame.parts
            parts.append(b"\r\n")
        wire.send(parts)
        answer = wire.read()
        if isinstance(answer, Refused):
            return {key: _error(answer, key) for key in frames}
        _expect(answer, b"OK")
        return dict.fromkeys(frames)

    def _put_large(self, key: str, frame: Frame) -> Mapping[str, Exception | None]:
        name = self._prefix + b"\0part:" + uuid.uuid4().hex.encode()  # no key has a zero byte
        pieces = pieces_of(frame.parts, self._part_bytes)
        try:
            with self._pool.reading() as wire:  # nobody sees it yet: a lost answer changes nothing
                about = ("size", frame.ref.nbytes, "part", self._part_bytes, "0", frame.head)
                count, refused = 0, write_fields(wire, name, about, self._keep_s)
                for count, piece in enumerate(pieces, 1):
                    if refused is None:
                        refused = write_fields(wire, name, (count, piece), self._keep_s)
                if refused is not None:
                    wire.ask([command("UNLINK", name)])
                    return {key: _error(refused, key)}
        except HoldfastError as error:
            return {key: error}

        def finish(wire: Wire) -> Mapping[str, Exception | None]:
            words = ("EVAL", _FINISH, 2, name, self._name(key), count + 3)
            answer = wire.ask([command(*words)])[0]
            if isinstance(answer, Refused):
                return {key: _error(answer, key)}
            if answer == 0:
                return {key: Unavailable(f"{key}: took too long to write; parts expired", key=key)}
            _expect(answer, 1)
            return {key: None}

        return self._changed([key], "have been put", finish)

    def _prove(self, frames: Mapping[str, Frame], answer: dict[str, Exception | None]) -> None:
        """Read back what was put; what is not there, whole, has not been put."""
        wanted = {key: frames[key].ref for key, error in answer.items() if error is None}
        for key, found in self.get(wanted).items():
            if isinstance(found, NotFound):
                answer[key] = Corrupt(f"{key}: was put, and is not there", key=key)
            elif isinstance(found, Exception):
                answer[key] = found
            else:
                try:
                    head = open_head(found, wanted[key])
                    prove(head, (found[head.nbytes :],), wanted[key])
                except Gone:
                    pass  # replaced already: whoever did that has seen ours, or does not care
                except Corrupt as error:
                    answer[key] = error

    # Get

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys."""
        answer: dict[str, memoryview | Exception] = {}
        sizes = {key: one.nbytes for key, one in wanted.items() if isinstance(one, Ref)}
        small = [key for key in wanted if sizes.get(key, 0) <= self._part_bytes]
        try:
            with self._pool.reading() as wire:
                self._get_small(wire, small, len(sizes) == len(wanted), answer)
                # A hash looks like nothing to MGET. Asking again also makes sure that a key
                # is missing, and that it was not the question that was misunderstood.
                rest = {key: one for key, one in wanted.items() if key not in answer}
                if rest:
                    self._get_large(wire, rest, answer)
        except HoldfastError as error:
            return {key: answer.get(key, error) for key in wanted}
        return answer

    def _get_small(
        self, wire: Wire, keys: list[str], known: bool, answer: dict[str, memoryview | Exception]
    ) -> None:
        """Read what is kept as strings.

        Of plain keys nobody knows the size: the first few tell how many to ask for next, so
        that the server never has to hold all of them in an answer.
        """
        at, count = 0, len(keys) if known else _FIRST_KEYS
        while at < len(keys):
            some = keys[at : at + count]
            at += len(some)
            wire.send(command("MGET", *map(self._name, some)))
            found = wire.read_values(len(some))
            if isinstance(found, Refused):
                answer.update({key: _error(found, key) for key in some})
                continue
            nbytes = 1
            for key, value in zip(some, found, strict=True):
                if value is not None:
                    answer[key] = memoryview(value)
                    nbytes += len(value)
            count = max(1, self.most_bytes * len(some) // nbytes)

    def _get_large(
        self,
        wire: Wire,
        wanted: Mapping[str, Ref | str],
        answer: dict[str, memoryview | Exception],
    ) -> None:
        """Read what is kept in parts, or make sure that nothing is there."""
        names = {key: self._name(key) for key in wanted}
        found = wire.ask([command("HMGET", name, *ABOUT) for name in names.values()])
        for (key, name), about in zip(names.items(), found, strict=True):
            if about == [None, None, None]:
                answer[key] = NotFound(f"{key}: nothing is there", key=key)
            elif isinstance(about, Refused) and about.code == "WRONGTYPE":
                value = wire.ask([command("GET", name)])[0]  # replaced by a smaller one
                answer[key] = (
                    memoryview(value)
                    if isinstance(value, bytearray)
                    else Corrupt(f"{key}: something else than a value is there", key=key)
                )
            elif isinstance(about, Refused):
                answer[key] = _error(about, key)
            else:
                answer[key] = self._get_parts(wire, key, wanted[key], about)

    def _get_parts(
        self, wire: Wire, key: str, wanted: Ref | str, about: Answer
    ) -> memoryview | Exception:
        try:
            size, part, head = described(about, key)
            open_head(head, wanted, size)  # so that nobody believes in a size alone
            memory = memoryview(bytearray(size))
        except Corrupt as error:
            return error
        except MemoryError:
            return NoRoom(f"{key}: no memory for a value of this size", key=key)
        memory[: len(head)] = head
        refused = read_parts(wire, self._name(key), memory[len(head) :], part)
        return memory if refused is None else _error(refused, key)

    # The rest

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys."""
        plain = [key for key, generation in wanted.items() if generation is None]
        exact = {key: number for key, number in wanted.items() if number is not None}
        requests = [command("UNLINK", self._name(key)) for key in plain]
        if exact:
            names = map(self._name, exact)
            numbers = [number.to_bytes(8, "little") for number in exact.values()]
            requests.append(command("EVAL", _DELETE, len(exact), *names, *numbers))

        def delete(wire: Wire) -> Mapping[str, bool | Exception]:
            answers = wire.ask(requests)
            if exact:
                last = answers.pop()
                answers += last if isinstance(last, list) else [last] * len(exact)
            return _yes_or_no([*plain, *exact], answers)

        return self._changed(wanted, "be deleted", delete)

    def _changed(
        self, keys: Iterable[str], what: str, call: Callable[[Wire], Mapping[str, V | Exception]]
    ) -> Mapping[str, V | Exception]:
        """Change something; when the answer is lost, nobody knows whether that was done."""
        try:
            with self._pool.changing() as wire:
                return call(wire)
        except Lost as error:
            return dict.fromkeys(keys, UnknownOutcome(f"may or may not {what}: {error}"))
        except HoldfastError as error:
            return dict.fromkeys(keys, error)

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        try:
            with self._pool.reading() as wire:
                return _yes_or_no(
                    keys, wire.ask([command("EXISTS", self._name(key)) for key in keys])
                )
        except HoldfastError as error:
            return dict.fromkeys(keys, error)

    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning. What is not a value of ours is left out."""
        for key, size, head in self._walk(prefix):
            try:
                yield Stored(key, size, open_head(head, key, size).generation)
            except Corrupt:
                continue

    def _walk(self, prefix: str) -> Iterator[tuple[str, int, bytearray]]:
        """Key, size and beginning of each frame."""
        pattern = b"".join(
            b"\\" + bytes((byte,)) if byte in b"*?[]^-\\" else bytes((byte,))
            for byte in self._name(prefix)
        )
        cursor, seen = b"0", set[bytes]()  # Redis may tell a key twice
        parts = self._prefix + b"\0"
        while True:
            words = ("SCAN", cursor, "MATCH", pattern + b"*", "COUNT", _SCAN_COUNT)
            page = self._ask([command(*words)])[0]
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list):
                raise Unavailable("Redis answered a SCAN with something else")
            names = [bytes(name) for name in page[1] if isinstance(name, bytearray)]
            names = [name for name in names if name not in seen and not name.startswith(parts)]
            seen.update(names)
            yield from self._heads(names)
            cursor = bytes(page[0]) if isinstance(page[0], bytearray) else b"0"
            if cursor == b"0":
                return

    def _heads(self, names: Sequence[bytes]) -> Iterator[tuple[str, int, bytearray]]:
        requests = []
        for name in names:
            requests += [command("STRLEN", name), command("GETRANGE", name, 0, MAX_HEAD - 1)]
            requests.append(command("HMGET", name, *ABOUT))
        answers = self._ask(requests) if requests else []
        for index, name in enumerate(names):
            size, head, parts = answers[3 * index : 3 * index + 3]
            key = name[len(self._prefix) :].decode(errors="replace")
            if isinstance(size, int) and isinstance(head, bytearray) and size:
                yield key, size, head
            elif isinstance(parts, list) and parts != [None, None, None]:
                try:
                    size, _, head = described(parts, key)
                except Corrupt:
                    continue
                yield key, size, head

    def stat(self) -> Stat:
        """How much there is. Walks over all keys."""
        keys = nbytes = 0
        for _, size, _ in self._walk(""):
            keys, nbytes = keys + 1, nbytes + size
        text = self._ask([command("INFO", "memory")])[0]
        lines = text.splitlines() if isinstance(text, bytearray) else []
        info = dict(line.split(b":", 1) for line in map(bytes, lines) if b":" in line)
        try:
            return Stat(keys, nbytes, int(info[b"used_memory"]), int(info[b"maxmemory"]))
        except (KeyError, ValueError):
            raise Unavailable("Redis did not say how much memory it has") from None

    def close(self) -> None:
        """Hang up."""
        self._pool.close()

    def _ask(self, requests: list[list[Buffer]]) -> list[Answer]:
        with self._pool.reading() as wire:
            answers = wire.ask(requests)
        for answer in answers:
            if isinstance(answer, Refused) and answer.code != "WRONGTYPE":
                raise _error(answer, "")
        return answers


def _yes_or_no(keys: Sequence[str], answers: Sequence[Answer]) -> dict[str, bool | Exception]:
    found: dict[str, bool | Exception] = {}
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, Refused):
            found[key] = _error(answer, key)
        elif answer in (0, 1):
            found[key] = answer == 1
        else:
            raise Lost("the answer is neither yes nor no")
    return found


def _expect(answer: Answer, wanted: object) -> None:
    if answer != wanted:
        raise Lost(f"the answer was {str(answer)[:40]!r}")


def _error(answer: Refused, key: str) -> Exception:
    what = key or "the server"
    if answer.code in ("WRONGTYPE", "GONE"):
        return Corrupt(f"{what}: something else than a value is stored there ({answer})", key=key)
    if answer.code == "OOM":
        return NoRoom(f"{what}: the memory of Redis is full ({answer})", key=key)
    return refusal(answer, what)
