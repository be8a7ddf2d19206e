"""What the file system's errors mean to whoever publishes, loads or sweeps."""

import errno

from holdfast.errors import Denied, HoldfastError, NoRoom, Unavailable

__all__ = ["translate"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def translate(error: OSError, what: str) -> HoldfastError:
    """The error of our tree that says what happened and what to do."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return NoRoom(
            f"{what}: {reason}. Everything published before is intact; make room (or give the "
            "channel a byte budget) and try again"
        )
    if error.errno in _DENIED:
        return Denied(
            f"{what}: {reason}: check owner and mode of {error.filename or 'the folder'}"
        )
    return Unavailable(f"{what}: {reason} ({error.filename or 'no file named'})")
