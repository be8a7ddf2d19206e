"""Checkpoints: the values of a run as files, and back.

    holdfast.frames    for each value: length of key and frame (4 and 8 bytes), key, frame
    holdfast.json      how many they are, and of which runs

A value is saved and restored as the frame that it is, so the tokens in the controller's own
checkpoint mean it again, bit for bit. A run that loads the values of another one *adopts*
that run: its next checkpoint has them, too, and they are deleted with it. Nothing is loaded
from a checkpoint that is damaged or cut.
"""

import os
import struct
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import IO

import msgspec

from holdfast.contrib.transferqueue.client import HoldfastStorageClient
from holdfast.errors import Corrupt, NotFound
from holdfast.transfer.backend import Frame
from holdfast.transfer.batches import named, portions, split
from holdfast.transfer.frame import Ref, open_head, prove
from holdfast.transfer.store import again

__all__ = ["adopted", "load", "save"]

_FRAMES = "holdfast.frames"
_ABOUT = "holdfast.json"
_ADOPTS = "adopts"
_LENGTHS = struct.Struct("<IQ")
_AT_ONCE_BYTES = 64 << 20
_AT_ONCE_KEYS = 4096


class _About(msgspec.Struct):
    """What `holdfast.json` says."""

    format: int
    count: int
    nbytes: int
    runs: list[str]


def adopted(client: HoldfastStorageClient) -> list[str]:
    """The runs whose values were loaded into this one."""
    key = f"{client.settings.run}/{_ADOPTS}"
    if not client.store.exists([key])[key]:
        return []
    runs: list[str] = client.store.get([key])[key]
    return runs


def save(client: HoldfastStorageClient, folder: Path) -> None:
    """Write the values of this run and of those that it has adopted."""
    runs = [*adopted(client), client.settings.run]
    count = 0
    with (folder / _FRAMES).open("wb") as file:
        for run in runs:
            for key, frame in _stored(client, run):
                name = key.encode()
                file.write(_LENGTHS.pack(len(name), len(frame)))
                file.write(name)
                file.write(frame)
                count += 1
        nbytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    about = _About(1, count, nbytes, runs)
    (folder / _ABOUT).write_bytes(msgspec.json.encode(about))


def load(client: HoldfastStorageClient, folder: Path) -> None:
    """Put saved values back. Values that are there already stay as they are."""
    try:
        about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{folder / _ABOUT} is damaged: {error}") from error
    with (folder / _FRAMES).open("rb") as file:
        if os.fstat(file.fileno()).st_size != about.nbytes:
            raise Corrupt(f"{folder / _FRAMES} is not as long as {_ABOUT} says: it was cut")
        for _ in _frames(file, about.count):
            pass  # all of it is proven before anything of it is put
        file.seek(0)
        runs = dict.fromkeys((*adopted(client), *about.runs))
        runs.pop(client.settings.run, None)
        # First: what is put below can then always be found and deleted.
        client.store.put({f"{client.settings.run}/{_ADOPTS}": list(runs)})
        frames = _frames(file, about.count)
        for some in portions(frames, _AT_ONCE_KEYS, _AT_ONCE_BYTES, attrgetter("ref.nbytes")):
            _put(client, {frame.ref.key: frame for frame in some})


def _stored(client: HoldfastStorageClient, run: str) -> Iterator[tuple[str, memoryview]]:
    """The frames of a run, proven; what is deleted meanwhile is left out."""
    store, skip = client.store, f"{run}/{_ADOPTS}"
    found = {one.key: one for one in store.scan(f"{run}/") if one.key != skip}

    def once(keys: list[str]) -> dict[str, memoryview | Exception]:
        answer = store.backend.get({key: key for key in keys})
        return {key: _copied(key, frame) for key, frame in answer.items()}

    for part in split(found, attrgetter("nbytes"), _AT_ONCE_KEYS, _AT_ONCE_BYTES):
        got = named(store.policy.subset(part, once, on=again, partial=True))
        for error in got.failures.values():
            if not isinstance(error, NotFound):
                raise error
        yield from got.values.items()


def _copied(key: str, frame: memoryview | Exception) -> memoryview | Exception:
    if isinstance(frame, Exception):
        return frame
    copy = memoryview(bytes(frame))
    try:
        _proven(key, copy)
    except Corrupt as error:
        return error
    return copy


def _proven(key: str, data: memoryview) -> Frame:
    head = open_head(data, key)
    payload = data[head.nbytes :]
    prove(head, (payload,), key)
    ref = Ref(key, head.generation, head.checksum, len(data))
    return Frame(bytes(data[: head.nbytes]), (payload,), ref)


def _frames(file: IO[bytes], count: int) -> Iterator[Frame]:
    """Read frames and prove them."""
    for number in range(count):
        try:
            key_bytes, nbytes = _LENGTHS.unpack(file.read(_LENGTHS.size))
            key = file.read(key_bytes).decode()
            frame = _proven(key, memoryview(file.read(nbytes)))
        except (struct.error, UnicodeDecodeError, Corrupt) as error:
            raise Corrupt(f"{file.name}: value {number} is damaged: {error}") from error
        yield frame


def _put(client: HoldfastStorageClient, frames: dict[str, Frame]) -> None:
    backend = client.store.backend

    def once(keys: list[str]) -> dict[str, bool | Exception]:
        answer = backend.put({key: frames[key] for key in keys})
        return {key: error or True for key, error in answer.items()}

    client.store.policy.subset(frames, once, on=again)
