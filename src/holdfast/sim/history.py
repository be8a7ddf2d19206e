"""A recorded history of concurrent calls on a ledger, as JSON lines too, and its verdict.

Recorders in tests and simulations write it, `holdfast.sim.linearizability` judges it.
Times are whole numbers of one clock that all recorders share (`time.monotonic_ns` is one
across the processes of a Linux machine). An operation whose outcome is not known has
`returned=None`: it may take effect at any moment after its invocation, or never.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.errors import Corrupt, Mistake

SHOWN_MAX = 12

Value = str | int
Outcome = Literal["linearizable", "violated", "undecided"]


class Read(msgspec.Struct, frozen=True, tag_field="op", tag="read"):
    """Answer: the value, None when the key is absent."""

    key: str


class Write(msgspec.Struct, frozen=True, tag_field="op", tag="write"):
    """Answer: None."""

    key: str
    value: Value


class Cas(msgspec.Struct, frozen=True, tag_field="op", tag="cas"):
    """Write if the key holds `expected` (None: is absent). Answer: whether it was written."""

    key: str
    expected: Value | None
    value: Value


class Remove(msgspec.Struct, frozen=True, tag_field="op", tag="remove"):
    """Answer: whether there was something to remove; None if that was not asked."""

    key: str


class Multi(msgspec.Struct, frozen=True, tag_field="op", tag="multi", omit_defaults=True):
    """If all keys hold what is expected: read, then write (None removes), in one moment.

    Answer: what was read, in order; False when an expectation did not hold.
    """

    reads: tuple[str, ...] = ()
    writes: dict[str, Value | None] = {}
    expect: dict[str, Value | None] = {}


Call = Read | Write | Cas | Remove | Multi
Answer = bool | Value | tuple[Value | None, ...] | None


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One recorded call. `revision` is what the ledger answered with, 0 if not recorded."""

    process: str
    invoked: int
    returned: int | None
    call: Call
    answer: Answer = None
    revision: int = 0

    def __post_init__(self) -> None:
        if self.returned is not None and self.returned < self.invoked:
            raise Mistake(f"an operation cannot return before it is invoked: {self}")

    def __str__(self) -> str:
        end = "?" if self.returned is None else self.returned
        answer = "unknown" if self.returned is None else repr(self.answer)
        stamp = f" at revision {self.revision}" if self.revision else ""
        return f"[{self.invoked}..{end}] {self.process}: {self.call!r} -> {answer}{stamp}"


class Verdict(msgspec.Struct, frozen=True):
    """What was found. `str()` tells it in full.

    On a violation `prefix` is the longest run of operations that could be put in order
    and `stuck` those of which one had to come next and none could.
    """

    outcome: Outcome
    explored: int
    reason: str = ""
    keys: tuple[str, ...] = ()
    prefix: tuple[Operation, ...] = ()
    stuck: tuple[Operation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the history was shown to be possible."""
        return self.outcome == "linearizable"

    def __str__(self) -> str:
        lines = [f"{self.outcome} ({self.explored} states explored)"]
        if self.reason:
            lines.append(self.reason)
        if self.prefix:
            left_out = max(0, len(self.prefix) - SHOWN_MAX)
            lines.append(f"in order, {len(self.prefix)} operations:")
            lines += [f"  ... {left_out} before these"] * bool(left_out)
            lines += [f"  {one}" for one in self.prefix[left_out:]]
        if self.stuck:
            lines.append("could not be placed:")
            lines += [f"  {one}" for one in self.stuck]
        return "\n".join(lines)


def save(path: Path | str, history: Iterable[Operation]) -> None:
    """Keep a history as JSON lines."""
    Path(path).write_bytes(msgspec.json.Encoder().encode_lines(history))


def load(path: Path | str) -> list[Operation]:
    """Read what `save` wrote."""
    try:
        return msgspec.json.Decoder(Operation).decode_lines(Path(path).read_bytes())
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} is not a history: {error}") from None


def keys_of(call: Call) -> list[str]:
    """Every key that a call speaks of."""
    if isinstance(call, Multi):
        return [*call.reads, *call.writes, *call.expect]
    return [call.key]


def wrote(one: Operation) -> bool:
    """Whether the operation certainly made a revision of its own."""
    match one.call:
        case Write():
            return True
        case Cas() | Remove():
            return one.answer is True
        case Multi(writes=writes):
            return one.answer is not False and any(value is not None for value in writes.values())
    return False


def listed(keys: Sequence[str]) -> str:
    """Name keys in one line, not too many."""
    more = f" and {len(keys) - SHOWN_MAX} more" if len(keys) > SHOWN_MAX else ""
    return ", ".join(keys[:SHOWN_MAX]) + more
