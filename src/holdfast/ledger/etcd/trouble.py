"""What can go wrong between us and one etcd server, and what it means for the caller.

`Refused` and `Lost` are for `http.py` alone: whether a request may be tried elsewhere.
Everything else becomes one of our errors here, with a line that says what to do.
"""

import os
import ssl

import aiohttp

from holdfast.errors import (
    Corrupt,
    Denied,
    HoldfastError,
    Mistake,
    NoRoom,
    TooLarge,
    UnknownOutcome,
)
from holdfast.ledger.etcd import wire


class Endpoint:
    """One server. `proven` means that it has answered since it last failed."""

    def __init__(self, host: str, port: int, scheme: str) -> None:
        shown = f"[{host}]" if ":" in host else host
        self.name = f"{shown}:{port}"
        self.url = f"{scheme}://{self.name}"
        self.proven = False


class Refused(Exception):
    """This endpoint surely did not apply the request.

    `hopeless` is the error to raise when every endpoint refuses for such a reason:
    trying again without changing the call will not help.
    """

    def __init__(self, reason: str, hopeless: HoldfastError | None = None) -> None:
        super().__init__(reason)
        self.hopeless = hopeless


class Lost(Exception):
    """The request was sent, and no answer came: it may have been applied."""

    hopeless: HoldfastError | None = None


class Forbidden(Denied):
    """The login is good, but this user may not touch this key."""


def unknown(what: str) -> UnknownOutcome:
    """The error for a change whose answer was lost."""
    return UnknownOutcome(
        f"etcd at {what}: the change may or may not have been made; look before trying again"
    )


def error_of(fault: wire.Fault, user: str) -> Exception:
    """What a fault means, where every caller means the same by it."""
    match fault.verdict:
        case "refused":
            return Refused(fault.message)
        case "lost":
            return Lost(f"answered '{fault.message}'")
        case "token":
            return Denied("this etcd wants a login: put user:password@ into the URL")
        case "login":
            return Denied(f"etcd refuses the user {user!r} or its password")
        case "forbidden":
            who = f"the etcd user {user!r}" if user else "this client"
            return Forbidden(f"{who} may not do this: {fault.message}")
        case "no_room":
            return NoRoom(
                "etcd's space is used up (NOSPACE): compact, defragment, and clear the alarm"
            )
        case "too_large":
            return TooLarge(f"etcd refuses the request: {fault.message}")
        case "corrupt":
            return Corrupt(f"etcd says that its own data is corrupt: {fault.message}")
        case "mistake" | "no_auth":
            return Mistake(f"etcd refuses the request: {fault.message}")
        case _:
            return fault


def untrusted(endpoint: Endpoint, error: Exception) -> Refused:
    """The server's certificate is not one that we trust."""
    reason = f"its TLS certificate is not trusted: {one_line(error)}"
    return Refused(
        reason, Mistake(f"etcd at {endpoint.name}: {reason}; name its authority with ca=FILE")
    )


def no_tls(endpoint: Endpoint, error: aiohttp.ClientSSLError) -> Refused:
    """The TLS handshake failed."""
    refused = client_certificate(endpoint, error)
    if refused is not None:
        return refused
    reason = f"TLS failed: {one_line(error.os_error)}"
    return Refused(
        reason, Mistake(f"etcd at {endpoint.name}: {reason}; does this server speak TLS?")
    )


def client_certificate(endpoint: Endpoint, error: BaseException) -> Refused | None:
    """The server ended the TLS handshake because of who we are: it read no request."""
    text = str(error).lower()
    if "alert" not in text or "certificate" not in text:
        return None
    reason = "it wants a client certificate that it trusts"
    return Refused(reason, Denied(f"etcd at {endpoint.name}: {reason}; give cert=FILE, key=FILE"))


def one_line(error: BaseException) -> str:
    """An error as one line of text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        text = error.reason or str(error)
    elif isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        text = os.strerror(error.errno)
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__
