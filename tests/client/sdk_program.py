"""Drives a real client library as it is told, line by line; run by the tests in its environment.

    python tests/client/sdk_program.py tinker|fireworks

Reads a JSON object per line, answers with one: {"ok": ...}, or {"error": class, "text": ...}.
"""

import dataclasses
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from holdfast.client import Target, fireworks, tinker
from holdfast.proc import die_with_parent
from holdfast.retry import Policy

BASE_MODEL = os.environ.get("BASE_MODEL", "holdfast/counting")


class Library:
    """One client library, and the clients that were made with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.types: Any = import_module("tinker" if name == "tinker" else "fireworks.training.sdk")
        self.types = self.types.types
        self.service: Any = None
        self.training: Any = None

    def connect(
        self, gateway: str, key: str, wrapped: bool, warm_up_s: float = 0.0, patient: bool = False
    ) -> str:
        """Make a service client and a model; `patient`: with the retries that users have."""
        target = Target.of(gateway, api_key=key, account="acme", job="one")
        if not patient:
            quick = Policy(attempts=5, base_s=0.05, max_s=0.2, deadline_s=5.0)
            target = dataclasses.replace(target, policy=quick)
        if wrapped:
            wrapper = tinker if self.name == "tinker" else fireworks
            self.service = wrapper.connect(target, warm_up_s=warm_up_s)
        elif self.name == "tinker":
            made = import_module("tinker").ServiceClient
            self.service = made(base_url=target.base_url, api_key=key)
        else:
            made = import_module("fireworks.training.sdk").FiretitanServiceClient
            self.service = made(base_url=target.base_url, api_key=key)
        if self.name == "tinker":
            self.training = self.service.create_lora_training_client(base_model=BASE_MODEL, rank=1)
            return str(self.training.get_info().model_id)
        self.training = self.service.create_training_client(base_model=BASE_MODEL, lora_rank=1)
        return str(self.training.model_id)

    def data(self) -> list[Any]:
        """One small datum."""
        types = self.types
        target = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
        weights = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3])
        inputs = {"target_tokens": target, "weights": weights}
        prompt = types.ModelInput.from_ints([1, 2, 3])
        return [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]

    def step(self) -> dict[str, float]:
        """One training step: both operations are sent before either is waited for."""
        first = self.training.forward_backward(self.data(), "cross_entropy")
        adam = self.types.AdamParams(learning_rate=1e-4)
        second = self.training.optim_step(adam)
        return {**first.result().metrics, **second.result().metrics}

    def forward_backward(self) -> dict[str, float]:
        """One operation alone."""
        return dict(self.training.forward_backward(self.data(), "cross_entropy").result().metrics)

    def forward(self) -> dict[str, float]:
        """One that leaves no gradient."""
        return dict(self.training.forward(self.data(), "cross_entropy").result().metrics)

    def save(self) -> str:
        """A checkpoint."""
        return str(self.training.save_state("x").result().path)

    def without(self, module: str, name: str) -> None:
        """Connect with a library that lacks something."""
        owner = import_module(module)
        kept = getattr(owner, name)
        delattr(owner, name)
        tinker._service_class.cache_clear()
        try:
            target = Target.of("http://127.0.0.1:9", api_key="tml-x")
            (tinker if self.name == "tinker" else fireworks).connect(target)
        finally:
            setattr(owner, name, kept)
            tinker._service_class.cache_clear()

    def close(self) -> None:
        """Let go of everything."""
        if self.name == "tinker":
            self.service.close("success").result()
        else:
            self.service.close()


def main() -> None:
    """Do what each line says."""
    library = Library(sys.argv[1])
    for line in sys.stdin:
        ask = json.loads(line)
        begun = time.monotonic()
        try:
            said: dict[str, Any] = {"ok": getattr(library, ask.pop("do"))(**ask)}
        except Exception as error:  # noqa: BLE001 -- told to the test
            said = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**said, "took_s": time.monotonic() - begun}), flush=True)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    main()
