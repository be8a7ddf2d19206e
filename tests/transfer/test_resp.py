"""The Redis protocol: answers of every kind, in pieces of any size; and whatever else comes."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.errors import Denied, Unavailable
from holdfast.transfer.resp import Address, Answer, Lost, Refused, Wire, command
from patience import HANG_S

LIMIT_S = HANG_S  # a busy machine takes its time
HELLO = b"$20\r\nid=7 addr=1.2.3.4:56\r\n".replace(b"$20", b"$%d" % len(b"id=7 addr=1.2.3.4:56"))


@contextlib.contextmanager
def server(*pieces: bytes, hello: bytes = HELLO) -> Iterator[Address]:
    """Says hello, waits for a question, says the pieces one by one and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                with client:
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    client.recv(1000)
                    client.sendall(hello)
                    client.recv(1000)
                    for piece in pieces:
                        client.sendall(piece)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield Address(*listener.getsockname())
        finally:
            listener.close()
            thread.join()


def asked(address: Address) -> Answer:
    with contextlib.closing(Wire(address, LIMIT_S)) as wire:
        return wire.ask([command("ANY")])[0]


ANSWERS: list[tuple[bytes, Answer]] = [
    (b"+OK\r\n", b"OK"),
    (b":-12\r\n", -12),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", bytearray()),
    (b"$5\r\na\r\nbc\r\n", bytearray(b"a\r\nbc")),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n$1\r\nx\r\n*1\r\n$-1\r\n", [1, bytearray(b"x"), [None]]),
    (b"$300000\r\n" + b"z" * 300_000 + b"\r\n", bytearray(b"z" * 300_000)),
]


@pytest.mark.parametrize(("said", "meant"), ANSWERS, ids=lambda item: str(item)[:20])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_answers(said: bytes, meant: Answer, piece: int) -> None:
    """However the network cuts them."""
    step = max(piece, len(said) // 2000)
    with server(*(said[at : at + step] for at in range(0, len(said), step))) as address:
        assert asked(address) == meant


def test_an_error_is_an_answer() -> None:
    with server(b"-OOM command not allowed\r\n") as address:
        answer = asked(address)
    assert isinstance(answer, Refused)
    assert (answer.code, str(answer)) == ("OOM", "OOM command not allowed")


NONSENSE = [
    b"",
    b"\r\n",
    b"OK\r\n",
    b"+OK",
    b":twelve\r\n",
    b"$5\r\nab",
    b"$5\r\nabcdefg\r\n",
    b"$99999999999999\r\n",
    b"$" + b"9" * 5000 + b"\r\n",
    b"$-2\r\n",
    b"*-7\r\n",
    b"*99999999999\r\n",
    b"*1\r\n" * 2000,
    b"*2\r\n:1\r\n",
    b"+" + b"x" * 200_000,
    b"\xff\xfe\r\n",
]


READS: list[Callable[[Wire], object]] = [
    lambda wire: wire.read(),
    lambda wire: wire.read_values(2),
    lambda wire: wire.read_into(memoryview(bytearray(5))),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("said", NONSENSE, ids=lambda said: repr(said[:12]))
def test_everything_else_is_a_lost_connection(said: bytes, read: Callable[[Wire], object]) -> None:
    with server(said) as address, contextlib.closing(Wire(address, LIMIT_S)) as wire:
        wire.send(command("ANY"))
        with pytest.raises(Lost):
            read(wire)


def test_noise_is_never_more_than_a_lost_connection() -> None:
    """Answers with flipped bits are other answers, or the connection is lost; nothing else."""
    seed = 4
    rng = random.Random(seed)
    good = b"*3\r\n$3\r\nabc\r\n$-1\r\n$10\r\n0123456789\r\n"
    for _ in range(150):
        noisy = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            noisy[rng.randrange(len(noisy))] ^= 1 << rng.randrange(8)
        with server(bytes(noisy)) as address, contextlib.closing(Wire(address, 0.5)) as wire:
            wire.send(command("MGET", "a", "b", "c"))
            with contextlib.suppress(Lost):
                found = wire.read_values(3)
                assert isinstance(found, Refused) or len(found) == 3, f"seed {seed}: {noisy!r}"


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (b"-NOAUTH Authentication required.\r\n", Denied),
        (b"-LOADING Redis is loading\r\n", Unavailable),
        (b"+what\r\n", Unavailable),
        (b"$3\r\n\xff\xff\xff\r\n", Unavailable),
        (b"", Unavailable),
    ],
)
def test_a_bad_greeting(hello: bytes, error: type[Exception]) -> None:
    with server(hello=hello) as address, pytest.raises(error):
        Wire(address, 0.5)
