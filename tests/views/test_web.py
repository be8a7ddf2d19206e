"""The page and its streams over real sockets; the report as a file."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.errors import Mistake
from holdfast.views.page import page, policy
from holdfast.views.report import write_report
from holdfast.views.web import Web
from patience import HANG_S

from .logs import House, data_of, storm

LIMIT_S = HANG_S


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    server = Web(tmp_path)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def asked(web: Web, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    """An answer of the server, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            yield answer


def get(web: Web, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with asked(web, path, **headers) as answer:
        return answer, answer.read()


def snapshots(web: Web) -> Generator[dict[str, Any], None, None]:
    with asked(web, "/events") as answer:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_the_page_is_closed_to_the_outside(web: Web) -> None:
    """The page loads nothing, runs only its own script, and cannot be framed."""
    answer, body = get(web, "/")
    assert answer.status == 200
    rules = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in rules
    assert "frame-ancestors 'none'" in rules
    assert "unsafe" not in rules
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "Access-Control-Allow-Origin" not in answer.headers
    text = body.decode()
    assert not re.search(r"""(src|href)\s*=\s*["']""", text)
    assert "innerHTML" not in text
    assert text.count("<script") == text.count("</script>") == 1


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:{port}", True),
        ("localhost:{port}", True),
        ("[::1]:{port}", True),
        ("192.168.1.5", True),
        ("evil.example:{port}", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("localhost@evil.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_other_names_are_refused(web: Web, host: str, allowed: bool) -> None:
    """A page elsewhere that lets its name point here reads nothing (DNS rebinding)."""
    for path in ("/", "/metrics"):
        answer, body = get(web, path, Host=host.format(port=web.port))
        assert answer.status == (200 if allowed else 421)
        assert allowed or b"holdfast_" not in body


def test_a_taken_port_is_a_clear_mistake(web: Web, tmp_path: Path) -> None:
    """Two pages on one port: the second says so."""
    with pytest.raises(Mistake, match=f"port {web.port}"):
        Web(tmp_path, port=web.port)


def test_snapshots_come_as_things_happen(web: Web, tmp_path: Path) -> None:
    """A stream begins with what is known, goes on with what changed, has each event once."""
    stream = snapshots(web)
    assert next(stream)["step"] == 0
    house = House(tmp_path)
    house.begin()
    house.train()
    seen: list[int] = []
    for acknowledged in (16, 32):
        for data in stream:
            seen += [entry["n"] for entry in data["log"]]
            if data["queue"]["acknowledged"] == acknowledged:
                break
        house.train()
    assert seen == list(range(1, len(seen) + 1))
    stream.close()


def test_a_stream_ends_with_the_last_snapshot(tmp_path: Path) -> None:
    """When the view ends, whoever looks has seen everything."""
    web = Web(tmp_path)
    web.start()
    stream = snapshots(web)
    next(stream)
    storm(tmp_path)
    web.stop()
    *_, last = stream
    assert (last["how"], last["step"]) == ("finished", 30)


def test_there_is_room_for_so_many(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most is told so; the others go on."""
    monkeypatch.setattr(web, "streams", threading.BoundedSemaphore(1))
    stream = snapshots(web)
    next(stream)
    answer, _ = get(web, "/events")
    assert answer.status == 503
    stream.close()


def test_metrics_can_be_read_by_prometheus(web: Web, tmp_path: Path) -> None:
    """Counters and gauges of the run, in Prometheus' own format."""
    storm(tmp_path, end=False)
    assert web.live.wait(540, LIMIT_S)
    answer, body = get(web, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert values["holdfast_run_step",] == 30
    assert values["holdfast_queue_depth",] == 0
    assert values["holdfast_member_up", "replica-0"] == 1
    assert values["holdfast_member_deaths_total", "replica-0"] == 2
    assert values["holdfast_run_faults_total", "kill replica"] == 1
    assert values["holdfast_run_lost_seconds", "kill supervisor"] == pytest.approx(2.6, abs=0.01)
    assert values["holdfast_events_total", "step.trained"] == 30


def test_other_paths_are_not_there(web: Web) -> None:
    """Nothing of the file system is served."""
    for path in ("/run.json", "/../run.json", "/events/../run.json", "//x"):
        assert get(web, path)[0].status == 404


def test_the_report_is_one_file_with_everything(tmp_path: Path) -> None:
    """A report carries its data, with the final facts and every fault, and reaches nowhere."""
    storm(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    html, data = path.read_text(), data_of(path)
    assert policy(live=False) in html
    assert "connect-src 'none'" in html
    assert "<img" not in html, "text from events cannot become a tag"
    assert data["final"]["steps"] == 30
    assert data["about"]["config"] == {"steps": 30}
    assert len(data["faults"]) == data["summary"]["faults"] == 7
    assert "<img src=x onerror=alert(1)>" in json.dumps(data["log"])
    assert list(tmp_path.glob(".report*")) == []
    (tmp_path / "final.json").write_text('{"steps": ')
    assert data_of(write_report(tmp_path))["final"] == {}, "half a file is none"


def test_the_style_and_script_are_those_of_the_policy() -> None:
    """What the policy names by hash is what stands in the page."""
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy(live=True)
