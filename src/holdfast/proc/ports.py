"""Ports that are kept for servers which are started later, or again."""

import socket
import weakref

from holdfast.errors import Mistake

__all__ = ["HeldPort", "reserve"]


class HeldPort:
    """A TCP port that this process keeps for a server that must be told its number.

    A socket is bound to it that never listens. The kernel then gives the port to no outgoing
    connection, and to no program that asks for any port. The server binds it beside that socket,
    as often as it is started again: both set SO_REUSEADDR, as asyncio, uvicorn, http.server, Go,
    torch and nearly all others do by themselves. It is held until `close`, or as long as this
    object lives.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.close = weakref.finalize(self, held.close)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        self.port: int = held.getsockname()[1]

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(host: str, port: int) -> socket.socket:
    """Hold the port, which gateways share, so that no other program takes it.

    Of port 0 the kernel makes one that nothing uses. At a port with a number another service may
    be, which would share it: with that one a socket that shares with none collides.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        if port:
            with socket.socket(family) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise Mistake(
            f"{host}:{port} cannot be used ({error.strerror}): is another `holdfast serve` "
            "there? Give another --port, or 0 for any"
        ) from None
    return reserved
