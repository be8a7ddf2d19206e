"""Reads what a run has left in its folder.

- A last line without its end is what a killed writer leaves: it is passed over. Any other line
  that is not a whole event is a flaw, and so is an event that lacks what its type must have.
- The files of a run that is still going on are read one after another. What was written meanwhile
  is left out, in all of them, so that no effect is seen without its cause.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.check.history import Entry, Flaw, History, Life, MetricsLine
from holdfast.check.schema import SCHEMA, Record
from holdfast.errors import NotFound

__all__ = ["read_run"]

_MAX_LINE_BYTES = 1 << 20
_MARGIN_S = 0.1
"""Between the stamp of an event and its place in the file."""


class _Head(msgspec.Struct):
    type: str


_head = msgspec.json.Decoder(_Head)


def read_run(folder: Path) -> History:
    """Read a run. `NotFound` when there is none."""
    began = time.time()
    paths = _paths(folder)
    if not paths:
        raise NotFound(f"there are no event logs of a run in {folder}")
    entries: list[Entry[Record]] = []
    flaws: list[Flaw] = []
    for name, path in paths.items():
        _read_file(name, path, entries, flaws)
    metrics = _read_metrics(folder / "metrics.jsonl", flaws)
    history = History(tuple(paths), entries, flaws, metrics)
    if history.finished:
        return history
    early, late = began - _MARGIN_S, time.time() + _MARGIN_S
    kept = [entry for entry in entries if not early < entry.event.at <= late]
    return History(tuple(paths), kept, flaws, metrics)


def _paths(folder: Path) -> dict[str, Path]:
    found = [*folder.glob("events/*.jsonl"), *folder.glob("trainers/**/events/*.jsonl")]
    return {str(path.relative_to(folder)): path for path in sorted(found) if path.is_file()}


def _read_file(name: str, path: Path, entries: list[Entry[Record]], flaws: list[Flaw]) -> None:
    life, before = Life(name, 0, 0), 0
    with path.open("rb") as file:
        for number, line, is_last in _lines(file):
            event = _decode(line)
            if isinstance(event, str):
                if not is_last:
                    flaws.append(Flaw(f"{name}:{number}", event))
                continue
            if event.pid != life.pid or (event.seq == 1 and before >= 1):
                life = Life(name, life.index + 1, event.pid)
            before = event.seq
            entries.append(Entry(event, name, number, life))


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Number, content, and whether it is a last one that has no end."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        yield number, line, not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES


def _decode(line: bytes) -> Record | str:
    """The event of a line, or why it is none."""
    try:
        kind = SCHEMA.get(_head.decode(line).type)
        if kind is not None:
            return msgspec.json.decode(line, type=kind)
        fields = msgspec.json.decode(line)
        return msgspec.convert({**fields, "type": "event"}, Record)
    except msgspec.ValidationError as error:
        return f"not an event of its type: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "not a whole event"


def _read_metrics(path: Path, flaws: list[Flaw]) -> list[MetricsLine] | None:
    if not path.is_file():
        return None
    found = []
    with path.open("rb") as file:
        for number, line, is_last in _lines(file):
            try:
                fields = msgspec.json.decode(line, type=dict[str, object])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                if not is_last:
                    flaws.append(Flaw(f"{path.name}:{number}", "not a JSON object"))
                continue
            found.append(MetricsLine(number, fields))
    return found
