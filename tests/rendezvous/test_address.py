"""The address on which a node's servers listen, and that other nodes are told."""

import socket

import pytest

from holdfast.errors import Mistake
from holdfast.rendezvous import address

REMOTE = "etcd://192.0.2.1:2379"


@pytest.mark.parametrize("url", ["sqlite:////tmp/l.db", "etcd://127.0.0.1:2379", "memory:"])
def test_a_ledger_on_this_machine_means_loopback(url: str) -> None:
    """Nothing of a run on one machine is reached from another, unless its user says so."""
    assert address.own(None, url) == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "meant"), [("127.0.0.7", "127.0.0.7"), ("localhost", "127.0.0.1")]
)
def test_an_address_that_was_given_is_kept(given: str, meant: str) -> None:
    """As a number, so that all nodes mean the same by it, wherever the ledger is."""
    assert address.own(given, "sqlite:///l.db") in (meant, "::1")


def test_a_name_that_means_loopback_only_here_becomes_the_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many systems know their own name as 127.0.1.1: listening there would shut all others out."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(address, "_towards", lambda url: "10.0.0.3" if url == REMOTE else "::1")
    assert address.own("n3", REMOTE) == "10.0.0.3"
    assert address.own("n3", "sqlite:///l.db") == "127.0.1.1"


@pytest.mark.parametrize("given", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_nodes_is_a_mistake(given: str) -> None:
    """Listening on all interfaces instead would be no answer."""
    with pytest.raises(Mistake, match=f"--local-addr {given}"):
        address.own(given, "sqlite:///l.db")


def test_a_listener_is_reached_at_its_address_only() -> None:
    """Not at another one of the same machine."""
    with address.listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
