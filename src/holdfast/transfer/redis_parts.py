"""A value in parts, as a Redis hash: `size` and `part` in bytes, its head as field 0, then
its parts as fields 1, 2, ...

Nothing here decides when a value is in its place: see `redis.py`.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from holdfast.errors import Corrupt
from holdfast.transfer.frame import Buffer
from holdfast.transfer.resp import Answer, Refused, Wire, Word, command

__all__ = ["ABOUT", "described", "pieces_of", "read_parts", "write_fields"]

ABOUT = ("size", "part", "0")
"""The fields that tell what the others are."""
_MOST_DIGITS = 32


def write_fields(wire: Wire, name: bytes, words: Sequence[Word], keep_s: float) -> Refused | None:
    """Write fields of a hash that is not in its place yet, and let it expire, as one."""
    request = [*command("MULTI"), *command("HSET", name, *words)]
    wire.send([*request, *command("EXPIRE", name, ceil(keep_s)), *command("EXEC")])
    for answer in [wire.read() for _ in range(4)]:
        if isinstance(answer, Refused):
            return answer
        for inner in answer if isinstance(answer, list) else ():
            if isinstance(inner, Refused):
                return inner
    return None


def read_parts(wire: Wire, name: bytes, place: memoryview, part: int) -> Refused | None:
    """Read the parts of a hash. One more is always asked for than is being read."""
    count = -(-len(place) // part)
    refused = None
    for index in range(count + 1):
        if index < count:
            wire.send(command("HGET", name, index + 1))
        if index:
            refused = wire.read_into(place[(index - 1) * part : index * part]) or refused
    return refused


def pieces_of(parts: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """The same bytes, in pieces of this size, each as a list of views."""
    piece: list[Buffer] = []
    room = size
    for part in parts:
        view = memoryview(part)
        while len(view):
            piece.append(view[:room])
            room -= len(piece[-1])
            view = view[len(piece[-1]) :]
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def described(found: Answer, key: str) -> tuple[int, int, bytearray]:
    """Size, size of parts and head of a value that is kept in parts."""
    if isinstance(found, list) and len(found) == 3:
        size, part, head = found
        if (
            isinstance(size, bytearray)
            and isinstance(part, bytearray)
            and isinstance(head, bytearray)
            and size.isdigit()
            and part.isdigit()
            and len(size) + len(part) < _MOST_DIGITS
            and int(part) > 0
            and len(head) <= int(size)
        ):
            return int(size), int(part), head
    raise Corrupt(f"{key}: what is stored there is not a value in parts", key=key)
