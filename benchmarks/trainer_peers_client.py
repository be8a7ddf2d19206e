"""The client of `trainer_peers.py`: the real `tinker`, told what to do line by line.

Runs in the environment of the peers (scripts/setup-peers skyrl), which has no Holdfast:
`python -m benchmarks.trainer_peers_client`, with BENCH_URL, BENCH_KEY, BENCH_BASE and BENCH_RANK.
One JSON order per line in, one JSON answer per line out. All data are drawn from one seed, so
both services get the same.
"""

import importlib
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

VOCABULARY = range(6, 100)
PROMPT = [1, 20, 30, 40, 50, 60, 70, 80]


class Client:
    """One model at one service, and a sampler with its weights."""

    def __init__(self) -> None:
        self._tinker = importlib.import_module("tinker")
        self._types = self._tinker.types
        self._saves = 0
        self._training: Any = None
        self._sampling: Any = None

    def open(self) -> dict[str, Any]:
        """Make the model; the service may still be loading what it needs."""
        service = self._tinker.ServiceClient(
            base_url=os.environ["BENCH_URL"], api_key=os.environ["BENCH_KEY"]
        )
        self._training = service.create_lora_training_client(
            base_model=os.environ["BENCH_BASE"],
            rank=int(os.environ["BENCH_RANK"]),
            seed=1,
            train_unembed=False,
        )
        names = ("tinker", "skyrl", "jax", "flax")
        versions = {name: importlib.metadata.version(name) for name in names}
        return {"versions": versions}

    def _data(self, rows: int, length: int) -> list[Any]:
        luck = random.Random(0)
        data = []
        for _ in range(rows):
            tokens = luck.choices(VOCABULARY, k=length + 1)
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
            given = self._types.ModelInput.from_ints(tokens[:-1])
            data.append(self._types.Datum(model_input=given, loss_fn_inputs=inputs))
        return data

    def _send(self, data: list[Any]) -> list[Any]:
        adam = self._types.AdamParams(learning_rate=1e-3)
        return [
            self._training.forward_backward(data, "cross_entropy"),
            self._training.optim_step(adam),
        ]

    def steps(self, rows: int, length: int, count: int, ahead: int) -> dict[str, Any]:
        """Seconds per step: each is waited for, or `ahead` of them are sent before."""
        data, took = self._data(rows, length), []
        for _ in range(0, count, ahead):
            began = time.perf_counter()
            promises = [one for _ in range(ahead) for one in self._send(data)]
            for one in promises:
                one.result()
            took.append((time.perf_counter() - began) / ahead)
        return {"s": took}

    def save(self, count: int) -> dict[str, Any]:
        """Seconds of saves for training, and for sampling."""
        took: dict[str, list[float]] = {"state": [], "sampler": []}
        for _ in range(count):
            self._saves += 1
            began = time.perf_counter()
            self._training.save_state(f"state-{self._saves}").result()
            took["state"].append(time.perf_counter() - began)
            began = time.perf_counter()
            self._training.save_weights_for_sampler(f"sampler-{self._saves}").result()
            took["sampler"].append(time.perf_counter() - began)
        return took

    def sampler(self) -> dict[str, Any]:
        """Sample from the weights as they are from now on."""
        self._sampling = self._training.save_weights_and_get_sampling_client()
        return {}

    def _sample(self, samples: int, tokens: int) -> Any:
        return self._sampling.sample(
            prompt=self._types.ModelInput.from_ints(PROMPT),
            num_samples=samples,
            sampling_params=self._types.SamplingParams(max_tokens=tokens, temperature=1.0),
        )

    def sample(self, samples: int, tokens: int, at_once: int) -> dict[str, Any]:
        """Requests that are all sent before one is waited for."""
        began = time.perf_counter()
        made, troubles = 0, []
        for one in [self._sample(samples, tokens) for _ in range(at_once)]:
            try:
                made += sum(len(sequence.tokens) for sequence in one.result().sequences)
            except Exception as error:  # noqa: BLE001 -- whatever the client says is told
                troubles.append(_told(error))
        return {"s": time.perf_counter() - began, "tokens": made, "troubles": troubles}

    def killed(self, rows: int, length: int, ahead: int) -> Iterator[dict[str, Any]]:
        """Steps that are all sent before the engine dies, and one after it."""
        data = self._data(rows, length)
        promises = [one for _ in range(ahead) for one in self._send(data)]
        yield {"sent": True}
        yield _outcome(promises)
        yield _outcome(self._send(data))


def _outcome(promises: list[Any]) -> dict[str, Any]:
    """How many have a result, until when, and what the first of the others is told instead."""
    results, troubles, last_at = 0, [], 0.0
    for one in promises:
        try:
            one.result()
        except Exception as error:  # noqa: BLE001 -- whatever the client says is told
            troubles.append(_told(error))
        else:
            results += 1
        last_at = time.monotonic()
    return {"results": results, "troubles": troubles, "at": last_at}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Serve until there are no more orders."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    client = Client()
    for line in sys.stdin:
        order = json.loads(line)
        said = getattr(client, order.pop("do"))(**order)
        for answer in [said] if isinstance(said, dict) else said:
            print(json.dumps(answer), file=answers, flush=True)
    # The client's own threads, which are not Python's, may crash an interpreter that is ending.
    os._exit(0)


if __name__ == "__main__":
    main()
