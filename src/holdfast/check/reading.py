"""Reads what a run has left in its folder.

- A last line without its end is what a killed writer leaves: it is passed over. Any other line
  that is not a whole event is a flaw, and so is an event that lacks what its type must have.
- A log may have several files (`x.jsonl.1`, `x.jsonl.2`, …, `x.jsonl`). They are read as one, and
  lines are counted through. If the first is missing, the beginning was dropped for want of room.
- The files of a run that is still going on are read one after another. What was written meanwhile
  is left out, in all of them, so that no effect is seen without its cause.
"""

import contextlib
import glob
import os
import re
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
_OLDER = re.compile(r"\.([0-9]+)$")
"""The end of the name of a log's older file: the lower, the older; the first ever is 1."""
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
    cut = {name for name, path in paths.items() if _read_log(name, path, entries, flaws)}
    metrics = _read_metrics(folder / "metrics.jsonl", flaws)
    history = History(tuple(paths), entries, flaws, metrics, frozenset(cut))
    if history.finished:
        return history
    early, late = began - _MARGIN_S, time.time() + _MARGIN_S
    kept = [entry for entry in entries if not early < entry.event.at <= late]
    return History(tuple(paths), kept, flaws, metrics, frozenset(cut))


def _paths(folder: Path) -> dict[str, Path]:
    """The logs. One that has several files is known by the name of the newest."""
    found = [*folder.glob("events/*.jsonl*"), *folder.glob("trainers/**/events/*.jsonl*")]
    logs = {path.with_name(_OLDER.sub("", path.name)) for path in found if path.is_file()}
    logs = {path for path in logs if path.suffix == ".jsonl" and not path.name.startswith(".")}
    return {str(path.relative_to(folder)): path for path in sorted(logs)}


def _read_log(name: str, path: Path, entries: list[Entry[Record]], flaws: list[Flaw]) -> bool:
    """Read the files of a log as if they were one; whether its beginning was dropped.

    The newest is opened first: if it gets its number meanwhile, it is among the others.
    """
    with contextlib.ExitStack() as stack:
        opened: dict[int, BinaryIO] = {}
        with contextlib.suppress(FileNotFoundError):
            newest = stack.enter_context(path.open("rb"))
            opened[os.fstat(newest.fileno()).st_ino] = newest
        numbered = sorted(
            (int(found[1]), one)
            for one in path.parent.glob(f"{glob.escape(path.name)}.*")
            if (found := _OLDER.search(one.name))
        )
        files: dict[int, BinaryIO] = {}
        for _, one in numbered:
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(one.open("rb"))
                files[os.fstat(file.fileno()).st_ino] = file
        files.update({inode: file for inode, file in opened.items() if inode not in files})
        _read_files(name, list(files.values()), entries, flaws)
    return bool(numbered) and numbered[0][0] > 1


def _read_files(
    name: str, files: list[BinaryIO], entries: list[Entry[Record]], flaws: list[Flaw]
) -> None:
    life, before, number = Life(name, 0, 0), 0, 0
    for file in files:
        for line, is_last in _lines(file):
            number += 1
            event = _decode(line)
            if isinstance(event, str):
                if not is_last:
                    flaws.append(Flaw(f"{name}:{number}", event))
                continue
            if event.pid != life.pid or (event.seq == 1 and before >= 1):
                life = Life(name, life.index + 1, event.pid)
            before = event.seq
            entries.append(Entry(event, name, number, life))


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Content, and whether it is a last one that has no end."""
    while line := file.readline(_MAX_LINE_BYTES):
        yield line, not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES


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
        for number, (line, is_last) in enumerate(_lines(file), 1):
            try:
                fields = msgspec.json.decode(line, type=dict[str, object])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                if not is_last:
                    flaws.append(Flaw(f"{path.name}:{number}", "not a JSON object"))
                continue
            found.append(MetricsLine(number, fields))
    return found
