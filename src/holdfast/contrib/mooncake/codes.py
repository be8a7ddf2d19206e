"""Mooncake's numbers (mooncake-store/include/types.h), and the errors that they mean. Pure."""

from holdfast.errors import Mistake, NoRoom, NotFound, Unavailable, UnknownOutcome

__all__ = ["BAD_PARAMS", "NOT_FOUND", "RPC_FAILED", "get_error", "put_error", "word"]

NO_SPACE = -200
BAD_KEY = -400
BAD_PARAMS = -600
NOT_READY = -703
NOT_FOUND = -704
TRANSFER_FAILED = -800
RPC_FAILED = -900
_WORDS = {
    NO_SPACE: "no space",
    BAD_KEY: "not a key",
    BAD_PARAMS: "not accepted",
    NOT_READY: "still being written",
    -707: "the lease ended during the transfer",
    TRANSFER_FAILED: "the transfer failed",
    RPC_FAILED: "the master was not reached",
}


def put_error(key: str, code: int) -> Exception | None:
    """What the code of a put means; None: it is done."""
    if code == 0:
        return None
    if code == NO_SPACE:
        return NoRoom(
            f"{key}: no process that lends memory to this Mooncake has room for it. Lend more: "
            "&segment=4G in the URL of a process that stays",
            key=key,
        )
    if code in (BAD_KEY, BAD_PARAMS):
        return Mistake(f"{key}: Mooncake does not take it ({word(code)})", key=key)
    return UnknownOutcome(f"{key}: may or may not have been put ({word(code)})", key=key)


def get_error(key: str, code: int) -> Exception:
    """What the code of a get that failed means."""
    if code == NOT_FOUND:
        return NotFound(f"{key}: nothing is there", key=key)
    return Unavailable(f"{key}: {word(code)}", key=key)


def word(code: int) -> str:
    """A code for people."""
    return f"{_WORDS.get(code, 'Mooncake')}, code {code}"
