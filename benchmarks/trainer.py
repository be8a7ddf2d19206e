"""The trainer against the same step in a bare PyTorch loop, and what its promises cost.

`python -m benchmarks.trainer [--steps 20] [--operations 10000]`. One thread for everybody.

- Steps: forward_backward and optim_step through gateway, journal and service, both sent before
  either is waited for, against transformers and torch.optim.AdamW on the same batch.
- Restart: the trainer is killed; until the next operation is promised, and until it is done.
- Journal: bytes in the ledger and in segments per operation.
- Memory: of the trainer's process over many small operations.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from holdfast import proc

BASE = "holdfast/tiny"
JOB = "bench"
ROWS, LENGTH = 48, 96


class Service:
    """`holdfast serve` with one job, and one connection to it."""

    def __init__(self, folder: Path, port: int, child: proc.Child) -> None:
        self.folder, self.port, self.child = folder, port, child
        self.key = json.loads((folder / "serve.json").read_text())["key"]
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request on the one connection."""
        text = None if body is None else json.dumps(body)
        headers = {"X-Api-Key": self.key, "content-type": "application/json"}
        try:
            self._line.request(method, path, text, headers)
            answer = self._line.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        except (OSError, http.client.HTTPException):
            self._line.close()
            return 0, {}

    def call(self, name: str, body: dict[str, Any]) -> Any:
        """One call of the trainer's, until it is answered."""
        while True:
            path = f"/training/v1/rlorTrainerJobs/local/{JOB}/api/v1/{name}"
            status, said = self.ask("POST", path, body)
            if status == 200:
                return said
            if status not in (0, 408, 502, 503):
                raise SystemExit(f"{name}: {status} {said}")

    def result(self, promise: Any) -> Any:
        """What came of it."""
        return self.call("retrieve_future", {"request_id": promise["request_id"]})

    def trainer(self) -> psutil.Process:
        """The trainer's process."""
        for one in psutil.Process(self.child.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "-m holdfast.trainer " in " ".join([*one.cmdline(), ""]):
                    return one
        raise SystemExit("there is no trainer")


@contextlib.contextmanager
def serving(*more: str) -> Iterator[Service]:
    """A service in a folder of its own, with more words on its command line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "holdfast", "serve", "--folder", name]
        argv += ["--ledger", f"sqlite:///{name}/ledger.db", "--port", "0"]
        argv += ["--trainer", "holdfast", "--no-access-log", *more]
        env = {"XDG_STATE_HOME": f"{name}/state", "OMP_NUM_THREADS": "1"}
        with proc.spawn(argv, env=env, log=folder / "log") as child:
            note = folder / "serve.json"
            child.wait_until(lambda: note.exists() and _up(_port(note)), 60)
            service = Service(folder, _port(note), child)
            path = f"/v1/accounts/local/rlorTrainerJobs?rlorTrainerJobId={JOB}"
            service.ask("POST", path, {})
            service.call("probe", {})
            yield service


def _port(note: Path) -> int:
    return int(json.loads(note.read_text())["url"].rpartition(":")[2])


def _up(port: int) -> bool:
    try:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        line.request("GET", "/readyz")
        return line.getresponse().status == 200
    except OSError:
        return False


def _batch(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    luck = np.random.default_rng(seed)
    tokens = luck.integers(6, 100, size=(ROWS, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _model(service: Service) -> str:
    session = service.call("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    ask = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    made = service.call("create_model", ask)
    service.result(made)
    return str(made["model_id"])


def _data(seed: int) -> list[dict[str, Any]]:
    tokens, targets = _batch(seed)
    return [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": row.tolist()}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": aim.tolist(), "dtype": "int64", "shape": [LENGTH]}
            },
        }
        for row, aim in zip(tokens, targets, strict=True)
    ]


def steps(service: Service, count: int) -> list[float]:
    """Seconds of each step through the service."""
    model, took = _model(service), []
    data = _data(0)
    for step in range(count):
        began = time.perf_counter()
        given = {"data": data, "loss_fn": "cross_entropy"}
        first = {"model_id": model, "seq_id": 2 * step + 1, "forward_backward_input": given}
        second = {"model_id": model, "seq_id": 2 * step + 2}
        promises = [
            service.call("forward_backward", first),
            service.call("optim_step", {**second, "adam_params": {"learning_rate": 1e-3}}),
        ]
        for promise in promises:
            service.result(promise)
        took.append(time.perf_counter() - began)
    return took


def bare(folder: Path, count: int) -> list[float]:
    """Seconds of each step in a loop of one's own."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    tokens, targets = (torch.from_numpy(one) for one in _batch(0))
    took = []
    for _ in range(count):
        began = time.perf_counter()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        took.append(time.perf_counter() - began)
    return took


def restarts(service: Service, count: int) -> tuple[list[float], list[float]]:
    """Seconds from a kill to the next promise, and to its result."""
    model = _model(service)
    promised, done = [], []
    for number in range(1, count + 1):
        os.kill(service.trainer().pid, signal.SIGKILL)
        began = time.perf_counter()
        ask = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-3}}
        promise = service.call("optim_step", ask)
        promised.append(time.perf_counter() - began)
        service.result(promise)
        done.append(time.perf_counter() - began)
        time.sleep(10.5)  # an early death would slow the next start down
    return promised, done


def many(service: Service, count: int) -> tuple[float, list[float], float]:
    """Operations per second, resident MB along the way, and ledger bytes per operation."""
    model = _model(service)
    trainer = service.trainer()
    before = _size(service.folder)
    began = time.perf_counter()
    memory: list[float] = []
    ask = {"model_id": model, "adam_params": {"learning_rate": 1e-3}}
    for number in range(1, count + 1):
        promise = service.call("optim_step", {**ask, "seq_id": number})
        if number % 50 == 0:
            service.result(promise)
        if number % (count // 10) == 0:
            memory.append(trainer.memory_info().rss / 1e6)
    service.result(promise)
    rate = count / (time.perf_counter() - began)
    return rate, memory, (_size(service.folder) - before) / count


def _size(folder: Path) -> int:
    """Bytes of the ledger and of everything that the trainer keeps."""
    paths = [*folder.glob("ledger.db*"), *(folder / "trainers").rglob("*")]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--operations", type=int, default=10_000)
    given = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with serving() as service:
        ratios, ours, theirs = [], [], []
        tiny = service.folder / "trainers" / "bases" / "tiny"
        for _ in range(3):
            mine = statistics.median(steps(service, given.steps)[2:])
            other = statistics.median(bare(tiny, given.steps)[2:])
            ours.append(mine)
            theirs.append(other)
            ratios.append(mine / other)
        print(f"one step, {ROWS} × {LENGTH} tokens, median of {given.steps}, three rounds:")
        print(f"  through the service {statistics.median(ours) * 1e3:8.1f} ms")
        print(f"  bare PyTorch        {statistics.median(theirs) * 1e3:8.1f} ms")
        print(f"  ratio               {statistics.median(ratios):8.2f}")
        promised, done = restarts(service, given.restarts)
        print(f"kill → next promise   {statistics.median(promised):8.2f} s")
        print(f"kill → its result     {statistics.median(done):8.2f} s")
        rate, memory, size = many(service, given.operations)
        print(f"{given.operations} small operations: {rate:.0f} per second, {size:.0f} bytes each")
        print("resident MB along the way: " + ", ".join(f"{one:.0f}" for one in memory))


if __name__ == "__main__":
    main()
