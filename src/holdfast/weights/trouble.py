"""What the file system's errors mean to whoever publishes, loads or sweeps."""

import errno

from holdfast.errors import Denied, HoldfastError, NoRoom, Unavailable

__all__ = ["DENIED", "FULL", "NOT_A_FILE", "translate"]

NOT_A_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO)
"""What opening a link, a pipe, a folder or a socket says where a file was expected."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def translate(error: OSError, what: str) -> HoldfastError:
    """The error of our tree that says what happened and what to do."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return NoRoom(
            f"{what}: {reason}. Everything published before is intact; make room (or give the "
            "channel a byte budget) and try again"
        )
    if error.errno in DENIED:
        return Denied(
            f"{what}: {reason}: check owner and mode of {error.filename or 'the folder'}"
        )
    return Unavailable(f"{what}: {reason} ({error.filename or 'no file named'})")
