"""Ledger URLs: what they mean, and one clear line for what is wrong with them."""

from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.ledger import Put, open, without_password
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.timeouts import Timeouts

BAD = [
    ("", "is not a ledger URL"),
    ("x.db", "is not a ledger URL"),
    ("postgres://localhost/x", "no ledger is called 'postgres'"),
    ("sqlite:x.db", "write sqlite:///"),
    ("sqlite://x.db", "write sqlite:///"),
    ("sqlite:///", "write sqlite:///"),
    ("sqlite:///x.db?sink=full", "unknown option 'sink'"),
    ("sqlite:///x.db?sync=maybe", "sync is 'normal'"),
    ("memory:a/b", "a plain name"),
    ("etcd:localhost:2379", "write etcd://host:port"),
    ("etcd://", "write etcd://host:port"),
    ("etcd://localhost", "is not host:port"),
    ("etcd://a:1,b", "'b' is not host:port"),
    ("etcd://a:99999", "is not host:port"),
    ("etcd://a:1?timeout=soon", "timeout is a number of seconds"),
    ("etcd://a:1?ca=/no/such/file", "the ca file /no/such/file is not there"),
    ("etcd://u:secret@a", "is not host:port"),
]


@pytest.mark.parametrize(("url", "words"), BAD)
def test_a_bad_url_is_one_clear_line(url: str, words: str) -> None:
    """The message names what is wrong and never shows a password."""
    with pytest.raises(Mistake) as caught:
        open(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slashes: relative. Four: absolute. Escapes are decoded."""
    monkeypatch.chdir(tmp_path)
    for url, path in [
        ("sqlite:///x.db", Path("x.db")),
        ("sqlite:////a/x.db?sync=full", Path("/a/x.db")),
        ("sqlite:///a%20b.db", Path("a b.db")),
    ]:
        led = open(url)
        assert isinstance(led, SqliteLedger)
        assert led.path == path.absolute()


@pytest.mark.parametrize("url", ["memory:", "sqlite:///x.db", "etcd://a:1"])
def test_the_time_outs_reach_every_back_end(url: str) -> None:
    """What is opened keeps the table; one that is out of order is refused."""
    times = Timeouts(ledger_call_s=1.5, update_deadline_s=20.0)
    led = open(url, timeouts=times)
    assert led.timeouts is times
    if isinstance(led, EtcdLedger):
        assert led._client.timeout_s == 1.5
    with pytest.raises(Mistake, match="time-outs out of order"):
        open(url, timeouts=Timeouts(ledger_lease_s=1.0))


async def test_memory_by_name_is_shared() -> None:
    """The same name is the same ledger; no name is always a new one."""
    async with (
        open("memory:shared") as one,
        open("memory:shared") as two,
        open("memory:") as three,
    ):
        await one.txn([], [Put("/a", b"")])
        assert await two.get("/a") is not None
        assert await three.get("/a") is None


def test_passwords_are_not_shown() -> None:
    assert without_password("etcd://u:secret@h:1?tls=1") == "etcd://u@h:1?tls=1"
    assert without_password("sqlite:///x.db") == "sqlite:///x.db"
