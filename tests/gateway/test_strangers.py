"""Callers without a key: how often they may ask, and what that may cost."""

import concurrent.futures
import http.client
from collections import Counter
from pathlib import Path

import msgspec

from gateway.service import Service, serve
from holdfast.gateway.strangers import Bucket, Strangers
from patience import until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """Also when the clock stands still or goes back."""
    bucket = Bucket(3.0, 0.5, 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s == 2
    assert not bucket.take(9.0)
    assert bucket.take(11.0)
    assert not bucket.take(11.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_addresses_are_counted_apart_and_their_number_is_bounded() -> None:
    """One address is not another, a /64 is one; a million of them take no more room than 10."""
    clock = Clock()
    strangers = Strangers(clock, burst=2.0, per_s=1.0, addresses=10)
    for address in ("10.0.0.1", "2001:db8::1", "::ffff:10.0.0.2"):
        assert [strangers.knock(address) for _ in range(3)] == [0, 0, 1]
    assert strangers.knock("2001:db8::ffff:2"), "the same /64"
    assert not strangers.knock("2001:db8:0:1::1"), "the next one"
    assert not strangers.knock("::ffff:10.0.0.3"), "IPv4 through an IPv6 socket"
    for number in range(1000):
        strangers.knock(f"10.1.{number // 250}.{number % 250}")
    assert len(strangers) == 10


def test_lines_are_bounded_and_the_rest_is_counted() -> None:
    """Every refusal has a line, or is in a count."""
    clock = Clock()
    strangers = Strangers(clock, lines_burst=5.0, lines_per_s=1.0)
    told = 0
    for _ in range(100):
        if strangers.may_log():
            told += 1 + strangers.unlogged()
        clock.now += 0.1
    assert told + strangers.unlogged() == 100
    assert strangers.unlogged() == 0


def flood(service: Service, count: int, key: str) -> Counter[int]:
    """Requests on one connection, one after the other; what came back."""
    found: Counter[int] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    for _ in range(count):
        connection.request("GET", service.jobs(), headers={"X-Api-Key": key} if key else {})
        answer = connection.getresponse()
        answer.read()
        found[answer.status] += 1
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
    connection.close()
    return found


def told(service: Service) -> tuple[int, int]:
    """How many requests without a key have a line, and how many are counted in one."""
    service.ask("GET", service.jobs())  # with the next line the count is told
    text = (service.folder / "events" / "gateway-0.jsonl").read_bytes()
    said = [msgspec.json.decode(line) for line in text.splitlines() if line.endswith(b"}")]
    lines = [one for one in said if one["type"] == "gateway.access" and not one["account"]]
    return len(lines), sum(one["count"] for one in said if one["type"] == "gateway.unlogged")


def test_strangers_fill_no_disk_and_hold_up_nobody(tmp_path: Path) -> None:
    """2,000 requests without a key, and with wrong ones: few are looked at, a count is kept of
    those without a line, and a caller with a key, from the same address, hears nothing of it."""
    with serve(tmp_path) as service, concurrent.futures.ThreadPoolExecutor(8) as pool:
        service.ask("GET", service.jobs())
        floods = [pool.submit(flood, service, 250, key) for key in ("", "x", "", "x") * 2]
        healthy = [service.ask("GET", service.jobs()).status for _ in range(50)]
        found = sum((one.result() for one in floods), Counter())
        assert set(healthy) == {200}
        assert found[401] + found[429] == 2000
        assert found[429] > 1000
        until(lambda: sum(told(service)) == 2000, "each request has a line or is counted")
        assert told(service)[0] < 200
