"""The examples in deploy/: real nginx and HAProxy in front of real gateways."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.service import Service, serve
from holdfast.proc import HeldPort, spawn
from patience import until

DEPLOY = Path(__file__).parents[2] / "deploy"
pytestmark = [pytest.mark.long]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("behind")) as it:
        it.create("behind")
        it.wait("behind")
        yield it


def _program(name: str, package: str) -> str:
    found = shutil.which(name) or f"/usr/sbin/{name}"
    if not Path(found).exists():
        pytest.fail(f"{name} is not installed: apt-get install {package} (make test-long does)")
    return found


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_trainer_is_reached_through_it(service: Service, tmp_path: Path, name: str) -> None:
    """The file as it is, but for the ports; the second gateway it names is not there."""
    held = [HeldPort(), HeldPort()]
    front, nobody = (one.port for one in held)
    example = DEPLOY / ("nginx.conf" if name == "nginx" else "haproxy.cfg")
    text = example.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{front}")
    text = text.replace("127.0.0.1:8700", f"127.0.0.1:{service.port}")
    text = text.replace("127.0.0.1:8701", f"127.0.0.1:{nobody}")
    if name == "nginx":
        text = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/err;\n{text}"
        argv = [_program("nginx", "nginx-light"), "-p", str(tmp_path), "-c", f"{tmp_path}/conf"]
    else:
        argv = [_program("haproxy", "haproxy"), "-db", "-f", f"{tmp_path}/conf"]
    (tmp_path / "conf").write_text(text)
    with spawn(argv, log=tmp_path / "log") as child:

        def reached() -> bool:
            assert child.alive(), (tmp_path / "log").read_text()
            try:
                return service.ask("GET", service.way("behind"), port=front).status == 200
            except OSError:
                return False

        until(reached, f"{name} passes requests on")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            answer = service.ask("GET", service.way("behind"), port=front)
            assert answer.status == 200, answer
        assert answer.json["job"] == "local/behind"
        answer = service.ask("GET", service.way("never"), port=front)
        assert (answer.status, answer.json["error"]["code"]) == (404, "job_not_found")
