"""Holdfast's trainer against SkyRL's Tinker server: same client, same model, same batches.

`python -m benchmarks.trainer_peers [--rounds 3]`, after `scripts/setup-peers skyrl`. Both serve at
the same time, with one thread for their computing, and take turns; the client is the real `tinker`
of the newest version that SkyRL understands. Warmed up first: jax compiles per shape.

- Speed: steps, steps sent ahead, saves, samples.
- Repeats: the same number sent twice, as a client does whose answer got lost.
- Kill: `kill -9` of the engine halfway through steps that were sent ahead. SkyRL's server then
  ends; it is started again at once on the same database, as a supervisor would.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from benchmarks.trainer import JOB, Service, serving
from holdfast import proc
from holdfast.engine.tiny import make_tiny

VENV = Path(__file__).parents[1] / ".venv-peers-skyrl"
RANK = 16
BATCH = {"rows": 48, "length": 96}
SMALL = {"rows": 4, "length": 32}
SAMPLES, TOKENS, AT_ONCE = 64, 16, 128
AHEAD = 8
LIMIT_S = 240.0


class Served(Protocol):
    """A service that can be asked, and whose engine can be killed."""

    name: str
    url: str
    key: str
    base: str

    def root(self) -> int:
        """The process that all others of it come from."""

    def engine(self) -> psutil.Process:
        """The process that computes."""

    def revive(self) -> str:
        """What has to be done after a kill; what was seen."""


class Holdfast:
    """`holdfast serve` with its own trainer."""

    name = "Holdfast"
    base = "bench"

    def __init__(self, service: Service) -> None:
        self._service = service
        self.key = service.key
        self.url = f"http://127.0.0.1:{service.port}/training/v1/rlorTrainerJobs/local/{JOB}"

    def root(self) -> int:
        return self._service.child.pid

    def engine(self) -> psutil.Process:
        return self._service.trainer()

    def revive(self) -> str:
        return "another trainer takes over by itself"


class SkyRL:
    """SkyRL's API server and engine, on SQLite and jax."""

    name = "SkyRL"
    key = "tml-bench"

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self.base = folder, str(model)
        self._held = proc.HeldPort()
        self._port = self._held.port
        self.url = f"http://127.0.0.1:{self._port}"
        # One is the base model's. Its steps take longer the more there are.
        self.child = self._start(adapters=2)

    def _start(self, adapters: int) -> proc.Child:
        # It starts its engine with `uv run` and the words that it was started with itself.
        argv = [f"{VENV}/bin/uv", "run", "--no-project", "--python", f"{VENV}/bin/python"]
        argv += ["-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(self._port)]
        argv += ["--base-model", self.base, "--backend", "jax"]
        # The sizes it needs and no more; samples in one shape, so that they compile once.
        sizes = {"max_lora_adapters": adapters, "max_lora_rank": RANK}
        sizes["sample_max_num_sequences"] = SAMPLES
        argv += ["--backend-config", json.dumps(sizes)]
        argv += ["--checkpoints-base", f"{self._folder}/checkpoints"]
        argv += ["--database-url", f"sqlite:///{self._folder}/tinker.db"]
        env = {
            "PATH": f"{VENV}/bin:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "UV_OFFLINE": "1",
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": f"{self._folder}/uv",
            "JAX_PLATFORMS": "cpu",
            "NPROC": "1",
            "OMP_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        }
        child = proc.spawn(argv, env=env, log=self._folder / "log")
        child.wait_until(lambda: post(self, "client/config", {})[0] == 200, LIMIT_S)
        return child

    def root(self) -> int:
        return self.child.pid

    def engine(self) -> psutil.Process:
        for one in psutil.Process(self.child.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = one.cmdline()
                if "skyrl.tinker.engine" in words and words[0].endswith("python"):
                    return one
        raise SystemExit("there is no engine")

    def revive(self) -> str:
        began = time.perf_counter()
        self.child.wait(LIMIT_S)
        ended = time.perf_counter() - began
        self.child.kill_group()
        self.child = self._start(adapters=8)
        return f"its server ends {ended:.1f} s after the kill; we start it again"


def post(served: Served, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One request of Tinker's protocol, without its client."""
    where = urlsplit(served.url)
    line = http.client.HTTPConnection(str(where.hostname), where.port, timeout=LIMIT_S)
    headers = {"X-Api-Key": served.key, "content-type": "application/json"}
    try:
        line.request("POST", f"{where.path}/api/v1/{name}", json.dumps(body), headers)
        answer = line.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    except (OSError, http.client.HTTPException):
        return 0, {}
    finally:
        line.close()


def done(served: Served, promise: Any) -> Any:
    """What came of it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ask = {"request_id": promise["request_id"]}
        status, said = post(served, "retrieve_future", ask)
        if status == 200:
            return said
        if status not in (0, 408, 502, 503):
            break
    raise SystemExit(f"{served.name}: {status} {said}")


class Program:
    """A client's process, which does what it is told."""

    def __init__(self, served: Served, folder: Path) -> None:
        env = {
            "BENCH_URL": served.url,
            "BENCH_KEY": served.key,
            "BENCH_BASE": served.base,
            "BENCH_RANK": str(RANK),
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
        }
        self.served, self.errors = served, folder / f"client-{served.name}"
        with self.errors.open("w") as sink:
            self._child = subprocess.Popen(
                [f"{VENV}/bin/python", "-m", "benchmarks.trainer_peers_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env={**os.environ, **env},
                cwd=Path(__file__).parents[1],
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, do: str, **order: Any) -> None:
        """Give an order."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._child.stdin.flush()

    def next(self) -> dict[str, Any]:
        """The next answer; None within the limit is an answer too."""
        try:
            line = self._lines.get(timeout=LIMIT_S)
        except queue.Empty:
            return {"trouble": f"nothing within {LIMIT_S:.0f} s"}
        if not line:
            raise SystemExit(
                f"{self.served.name}'s client ended: {self.errors.read_text()[-2000:]}"
            )
        return dict(json.loads(line))

    def do(self, do: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer, which has to come."""
        self.tell(do, **order)
        answer = self.next()
        if "trouble" in answer:
            raise SystemExit(f"{self.served.name}, {do}: {answer['trouble']}")
        return answer

    def end(self) -> None:
        """Stop it, whatever it does."""
        self._child.kill()
        self._child.communicate()


def cpu_s(served: Served) -> float:
    """CPU time of all processes of a service until now."""
    root, total = psutil.Process(served.root()), 0.0
    for one in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            spent = one.cpu_times()
            total += spent.user + spent.system
    return total


class Figures:
    """What was measured, by what it is of and whose it is."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, list[float]]] = {}

    def add(self, what: str, whose: str, *values: float) -> None:
        """More of it."""
        self.of.setdefault(what, {}).setdefault(whose, []).extend(values)

    def table(self) -> Iterator[str]:
        """Medians, their spread, and the ratio."""
        yield "| median (lowest to highest) | Holdfast | SkyRL | Holdfast / SkyRL |"
        yield "| --- | --- | --- | --- |"
        for what, found in self.of.items():
            ours, theirs = found["Holdfast"], found["SkyRL"]
            ratio = statistics.median(ours) / statistics.median(theirs)
            yield f"| {what} | {_spread(ours)} | {_spread(theirs)} | {ratio:.2f} |"


def _spread(values: list[float]) -> str:
    one, low, high = (_short(each(values)) for each in (statistics.median, min, max))
    return one if len(values) == 1 else f"{one} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def warm(program: Program, figures: Figures) -> str:
    """Everything once, so that whatever compiles has compiled; the client's versions."""
    name = program.served.name
    opened = program.do("open")
    first = program.do("steps", **BATCH, count=1, ahead=1)["s"]
    figures.add("first step, s", name, *first)
    program.do("steps", **BATCH, count=1, ahead=1)
    program.do("steps", **SMALL, count=2, ahead=1)
    program.do("save", count=1)
    program.do("sampler")
    first_s = program.do("sample", samples=SAMPLES, tokens=TOKENS, at_once=1)["s"]
    figures.add(f"first {SAMPLES} samples of {TOKENS} tokens, s", name, first_s)
    program.do("sample", samples=1, tokens=TOKENS, at_once=2)
    return ", ".join(f"{one} {version}" for one, version in opened["versions"].items())


def measure(program: Program, figures: Figures, steps: int) -> None:
    """One round of everything that takes time."""
    name = program.served.name
    size = f"{BATCH['rows']} × {BATCH['length']} tokens"
    before = cpu_s(program.served)
    took = program.do("steps", **BATCH, count=steps, ahead=1)["s"]
    spent = (cpu_s(program.served) - before) / steps
    figures.add(f"step, {size}, ms", name, *(one * 1e3 for one in took))
    figures.add("the same, CPU time of the service per step, ms", name, spent * 1e3)
    took = program.do("steps", **BATCH, count=AHEAD, ahead=AHEAD)["s"]
    figures.add(f"step, the same, {AHEAD} sent before one is waited for, ms", name, took[0] * 1e3)
    size = f"{SMALL['rows']} × {SMALL['length']} tokens"
    took = program.do("steps", **SMALL, count=steps, ahead=1)["s"]
    figures.add(f"step, {size}, ms", name, *(one * 1e3 for one in took))
    took = program.do("steps", **SMALL, count=16, ahead=16)["s"]
    figures.add("step, the same, 16 sent before one is waited for, ms", name, took[0] * 1e3)
    saved = program.do("save", count=2)
    figures.add("save_state, ms", name, *(one * 1e3 for one in saved["state"]))
    figures.add("save_weights_for_sampler, ms", name, *(one * 1e3 for one in saved["sampler"]))
    for _ in range(2):
        made = program.do("sample", samples=SAMPLES, tokens=TOKENS, at_once=1)
        rate = made["tokens"] / made["s"]
        figures.add(f"{SAMPLES} samples × {TOKENS} tokens, one request, tokens/s", name, rate)
    made = program.do("sample", samples=1, tokens=TOKENS, at_once=AT_ONCE)
    figures.add(f"{AT_ONCE} requests of one sample at once, s", name, made["s"])
    for trouble in made["troubles"][:1]:
        print(f"{name}: {len(made['troubles'])} of {AT_ONCE} requests failed, first: {trouble}")


def repeats(served: Served) -> dict[str, str]:
    """What comes of the same number twice, by what was repeated."""
    first, again = (_model(served, session) for session in [_session(served)] * 2)
    found = {"create_model": "the same model" if first == again else "a second model"}
    other = _model(served, _session(served))
    losses = []
    for model, times in ((first, 2), (other, 1)):
        _twice(served, "forward_backward", _back(model, 1), 1)
        step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
        said = _twice(served, "optim_step", step, times)
        status, promise = post(served, "forward_backward", _back(model, 3))
        assert status == 200, promise
        outputs = done(served, promise)["loss_fn_outputs"]
        losses.append(-sum(sum(one["logprobs"]["data"]) for one in outputs))
        if times == 2:
            found["optim_step"] = said
    moved = abs(losses[0] / losses[1] - 1)
    found["optim_step"] += (
        ", one step" if moved < 1e-5 else f", two steps (loss off by {moved:.2%})"
    )
    found["forward_backward"] = _twice(served, "forward_backward", _back(first, 4), 2)
    save = {"model_id": first, "path": "again", "seq_id": 5}
    found["save_weights"] = _twice(served, "save_weights", save, 2)
    return found


def _session(served: Served) -> str:
    ask = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    return str(post(served, "create_session", ask)[1]["session_id"])


def _model(served: Served, session: str) -> str:
    adapter = {"rank": RANK, "seed": 1, "train_unembed": False}
    ask = {"session_id": session, "model_seq_id": 0, "base_model": served.base}
    status, made = post(served, "create_model", {**ask, "lora_config": adapter})
    assert status == 200, made
    done(served, made)
    return str(made["model_id"])


def _back(model: str, number: int) -> dict[str, Any]:
    length = SMALL["length"]
    tokens = [6 + one % 90 for one in range(length + 1)]
    given = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        },
    }
    data = {"data": [given] * SMALL["rows"], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": number, "forward_backward_input": data}


def _twice(served: Served, name: str, body: dict[str, Any], times: int) -> str:
    """Send it so often, with the same number each time; what came of the last."""
    promises = []
    for _ in range(times):
        status, said = post(served, name, body)
        if status != 200:
            return f"{status} {said.get('detail', said)}"
        done(served, said)
        promises.append(said["request_id"])
    return "the same promise" if len(set(promises)) == 1 else "a second promise"


def kill(program: Program) -> list[str]:
    """`kill -9` halfway through steps that were sent ahead: cells of a table."""
    served = program.served
    quickest_s = min(program.do("steps", **BATCH, count=3, ahead=1)["s"])
    program.tell("killed", **BATCH, ahead=AHEAD)
    assert program.next() == {"sent": True}
    time.sleep(AHEAD * quickest_s / 2)
    os.kill(served.engine().pid, signal.SIGKILL)
    began = time.monotonic()
    seen = served.revive()
    return [served.name, seen, *(_gets(program.next(), began) for _ in range(2))]


def _gets(answer: dict[str, Any], began: float) -> str:
    if "trouble" in answer:
        return str(answer["trouble"])
    troubles = answer["troubles"]
    text = f"{answer['results']} of {answer['results'] + len(troubles)} results"
    if troubles:
        text += ", then " + troubles[0][:120].replace("\n", " ")
    return f"{text}; {answer['at'] - began:.1f} s after the kill"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    if not (VENV / "bin" / "uv").exists():
        raise SystemExit(f"{VENV.name} is missing: scripts/setup-peers skyrl")
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny(folder / "model", hidden=given.hidden, layers=given.layers)
        ours = Holdfast(stack.enter_context(serving("--model", f"{Holdfast.base}={model}")))
        theirs = SkyRL(folder, model)
        stack.callback(lambda: theirs.child.kill_group())
        programs = [Program(one, folder) for one in (ours, theirs)]
        for one in programs:
            stack.callback(one.end)
        figures = Figures()
        versions, _ = (warm(one, figures) for one in programs)
        for _ in range(given.rounds):
            for one in programs:
                measure(one, figures, given.steps)
        for one in programs:
            held = one.served.engine().memory_info().rss / 1e6
            figures.add("resident memory of the engine, MB", one.served.name, held)
        after = os.getloadavg()[0]
        print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f} to {after:.1f}")
        print(f"{versions}, LoRA of rank {RANK}, {given.hidden} wide, {given.layers} layers")
        print(*figures.table(), "", sep="\n")
        print(f"| kill -9 halfway through {AHEAD} steps | | the client gets | of the next step |")
        print("| --- | --- | --- | --- |")
        for one in programs:
            print(f"| {' | '.join(kill(one))} |", flush=True)
            one.end()
        print("", *_repeated([repeats(ours), repeats(theirs)]), sep="\n")


def _repeated(found: list[dict[str, str]]) -> Iterator[str]:
    yield "| sent again with the same number | Holdfast | SkyRL |"
    yield "| --- | --- | --- |"
    for what in found[0]:
        yield f"| {what} | {' | '.join(one[what] for one in found)} |"


if __name__ == "__main__":
    main()
