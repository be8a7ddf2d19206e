"""A trainer that was stopped, replaced and wakes up changes nothing any more, and ends.

It runs as on a machine that cannot be reached: its host believes it dead, and nobody kills it.
"""

import concurrent.futures
import contextlib
import http.client
import json
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Self

import psutil
import pytest

from holdfast.jobs.fence import SECRET, Incarnation
from holdfast.proc import Child, spawn
from patience import HANG_S, until
from trainer.house import JOB, House
from trainer.kills.conftest import Reference, survive
from trainer.kills.story import Audit, fired

SCRIPT = Path(__file__).parent / "elsewhere.py"
FENCED = 5
"""What a trainer that was replaced exits with."""


class Machines:
    """Starts the trainers that `elsewhere.py` asks for, and keeps them whatever their host does.

    They are started by a thread of its own, because a child dies with the thread that began it.
    """

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        self._plan = plan
        self._children: dict[int, Child] = {}
        self._ports: dict[int, int] = {}
        self._secrets: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def flags(self) -> tuple[str, str]:
        """How `holdfast serve` is told of them."""
        command = shlex.join([sys.executable, str(SCRIPT), str(self.folder)])
        return "--trainer", f"default={command}"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            while not self._stop.wait(0.02):
                for path in self.folder.glob("*.json"):
                    epoch = int(path.stem)
                    if epoch not in self._children:
                        env = json.loads(path.read_text())
                        env["HOLDFAST_FAULTS"] = self._plan
                        env["HOLDFAST_FAULTS_LOG"] = str(self.faults)
                        child = spawn(
                            [sys.executable, "-m", "holdfast.trainer"],
                            env=env,
                            log=self.folder / f"{epoch}.log",
                        )
                        self._ports[epoch] = int(env["PORT"])
                        self._secrets[epoch] = env[SECRET]
                        self._children[epoch] = stack.enter_context(child)

    def trainer(self, epoch: int) -> Child:
        """The trainer of an epoch."""
        until(lambda: epoch in self._children, f"epoch {epoch} is started")
        return self._children[epoch]

    def ask(self, epoch: int, said: int, path: str, body: object) -> tuple[int, bytes]:
        """Ask a trainer itself, as a gateway does that believes `said` to be the epoch."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[epoch], timeout=30)
        headers = Incarnation("", "local", JOB, said, self._secrets[epoch]).headers()
        headers["content-type"] = "application/json"
        try:
            connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""  # it has ended
        finally:
            connection.close()


def _is_stopped(child: Child) -> bool:
    return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)


def _replace(there: House, machines: Machines, audit: Audit, point: str) -> int:
    """Have the first trainer stopped and replaced; returns how many results there were then."""
    until(lambda: bool(fired(machines.faults)), f"{point} is hit", 60)
    old = machines.trainer(1)
    until(lambda: _is_stopped(old), "it has stopped")
    before = audit.wait(0)
    there.service.kill(SCRIPT.name)
    until(lambda: there.epoch() == 2 and there.service.state(JOB) == "RUNNING", "2 runs", 60)
    assert _is_stopped(old), "nobody has touched it"
    return before


def _wake(machines: Machines, point: str) -> None:
    """Wake the first trainer up, while requests wait for it; it must do nothing but end."""
    old = machines.trainer(1)
    model = _model(machines)
    step = {"type": "optim_step", "model_id": model, "seq_id": 10_000, "adam_params": {}}
    asks = {
        "meant for the new one": (2, "optim_step", step),
        "meant for the old one": (1, "optim_step", step),
        "never promised": (1, "retrieve_future", {"request_id": f"{model}:9999"}),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # They wait in its queue until it wakes up.
        waiting = {name: pool.submit(machines.ask, 1, *ask) for name, ask in asks.items()}
        old.signal(signal.SIGCONT)
        assert old.wait(HANG_S) == FENCED, old.tail()
        answers = {name: one.result(HANG_S) for name, one in waiting.items()}
    print(f"{point}: {answers}")
    for name, (status, body) in answers.items():
        assert status in (421, 0), f"{name}: {status} {body!r}"


def _model(machines: Machines) -> str:
    """The model that the first trainer knows."""
    folder = json.loads((machines.folder / "1.json").read_text())["HOLDFAST_FOLDER"]
    channels = Path(folder, "local", JOB, "weights").glob("*.state")
    return next(channels).name.removesuffix(".state")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("point", "hit"),
    [
        ("trainer.journal.before", 20),
        ("trainer.segment.written", 20),
        ("trainer.compute.after", 18),
        ("trainer.result.after", 18),
        ("weights.publish.marked", 2),
        ("trainer.checkpoint.kept", 2),
        ("trainer.save.kept", 1),
    ],
)
def test_who_wakes_up_is_fenced(
    tmp_path: Path, reference: Reference, point: str, hit: int
) -> None:
    """Wherever it was stopped: it applies, acknowledges and publishes nothing, and exits."""
    with Machines(tmp_path / "machines", f"{point}:stop@{hit}!") as machines:

        def meanwhile(there: House, audit: Audit) -> None:
            _replace(there, machines, audit, point)
            _wake(machines, point)

        house = tmp_path / "house"
        assert survive(reference, house, *machines.flags, meanwhile=meanwhile) == (2, 2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nobody_waits_for_one_that_was_replaced(tmp_path: Path, reference: Reference) -> None:
    """The client goes on with the new trainer while the old one stays stopped."""
    with Machines(tmp_path / "machines", "trainer.compute.after:stop@18!") as machines:

        def meanwhile(there: House, audit: Audit) -> None:
            before = _replace(there, machines, audit, "trainer.compute.after")
            audit.wait(before + 12, 30.0)

        survive(reference, tmp_path / "house", *machines.flags, meanwhile=meanwhile)
