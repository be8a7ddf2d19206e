"""A folder of files that is there whole, or not at all.

- A process that is killed leaves nothing or everything under the folder's name: the files are
  written to a folder beside it, synced and renamed. What a killed process left there is
  removed by the next call for the same folder; the kernel's lock tells it from what a living
  process is making.
- Two processes may put the same files at once; both find them there afterwards.
- A folder that holds something else is never touched. Files beside those given do not count.
"""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast import faults
from holdfast.errors import Denied, Exists, NoRoom, Unavailable

__all__ = ["put_folder"]

_WRITTEN = faults.declare("engine.folder.file", "one more file of a folder is on the disk")
_COMPLETE = faults.declare("engine.folder.before_rename", "all is written, under another name")

_ATTEMPTS = 20


def put_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put the files there, all at once, unless just these are there already."""
    try:
        _put(folder.absolute(), files)
    except PermissionError as error:
        raise Denied(f"{folder} cannot be written: {error.strerror}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise Exists(f"{folder} cannot be made: {error.filename} is a file") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"there is no room for {folder}: {error.strerror}") from error
        raise


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if _there(folder, files):
        return
    _sweep(folder)
    with _workshop(folder) as making:
        for name, data in files.items():
            with (making / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            faults.point(_WRITTEN)
        _sync(making)
        faults.point(_COMPLETE)
        try:
            making.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not _there(folder, files):  # raises, if something else is there
                raise Unavailable(f"{folder} came and went; try again") from error
    _sync(folder.parent)


def _there(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether just these files are there; raises if something else is. Empty is not there."""
    if not folder.is_dir():
        if folder.exists():
            raise Exists(f"{folder} is a file: choose another name")
        return False
    if not any(folder.iterdir()):
        return False
    for name, data in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
            raise Exists(
                f"{folder} holds something else ({name} is not there, or differs): "
                "remove it, or choose another folder"
            )
    return True


@contextlib.contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A new folder beside this one, locked while its maker lives, and gone afterwards."""
    for _ in range(_ATTEMPTS):
        making = folder.with_name(_mark(folder) + secrets.token_hex(8))
        making.mkdir()
        with _locked(making) as held:
            if not held:
                continue  # swept between two lines: not locked yet, it looked abandoned
            try:
                yield making
            finally:
                shutil.rmtree(making, ignore_errors=True)  # is not there, if all went well
            return
    raise Unavailable(f"somebody removes what is being made beside {folder}; try again")


def _mark(folder: Path) -> str:
    return f".{folder.name}.making-"


def _sweep(folder: Path) -> None:
    """Remove what killed processes left beside the folder."""
    for left in folder.parent.glob(f"{glob.escape(_mark(folder))}*"):
        with _locked(left) as held:
            if held:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the kernel's lock on a folder; false if another has it or the folder is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(descriptor).st_nlink > 0 and path.is_dir()
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
