"""Where a node is reached: the one address on which its servers listen, and that others are told.

A server of a run (the cycle's store, the trainer's) has no password. It listens on the node's own
address, never on all interfaces: loopback when the ledger is on this machine, else the address
from which the node reaches the ledger, or `--local-addr`.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from holdfast.errors import Mistake
from holdfast.ledger.url import without_password

__all__ = ["LOOPBACK", "is_loopback", "listen", "own"]

LOOPBACK = "127.0.0.1"


def own(given: str | None, url: str) -> str:
    """This node's address, as a number; `given` is `--local-addr`, `url` the ledger's.

    A name becomes a number here, so that this node and the others mean the same by it: many
    machines know their own name as 127.0.1.1, and the others know it as something else.
    """
    if not given:
        return _towards(url)
    try:
        address = str(socket.getaddrinfo(given, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Mistake(f"--local-addr {given} is not found: {error.strerror}") from None
    is_name = given not in (address, "localhost")
    if is_name and is_loopback(address) and not is_loopback(towards := _towards(url)):
        return towards
    try:
        listen(address).close()
    except OSError as error:
        raise Mistake(
            f"--local-addr {given}: this node cannot listen on {address} ({error.strerror}): give "
            "an address that this node itself has and the other nodes reach"
        ) from None
    return address


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address and no other; port 0: any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def is_loopback(address: str) -> bool:
    """Whether an address, as a number, is reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _towards(url: str) -> str:
    """The address from which this node reaches the ledger; loopback when that is here."""
    if not url.startswith("etcd://"):
        return LOOPBACK
    try:
        hosts = url.removeprefix("etcd://").partition("?")[0].rpartition("@")[2]
        first = urlsplit(f"//{hosts.partition(',')[0]}")
        kind, *_, place = socket.getaddrinfo(first.hostname, first.port or 2379)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(place)  # sends nothing: asks for the route
            return str(sock.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Mistake(
            f"no way to the ledger at {without_password(url)}: {error}; or give --local-addr"
        ) from None
