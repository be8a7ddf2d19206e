"""Calls every public method of a client library; run in the libraries' environment by a test.

    LIBRARY=tinker HOUSE_URL=... HOUSE_KEY=... python tests/trainer/sdk/methods.py

Which methods there are is asked of the classes themselves. For each it says one line of JSON: its
name, and the error that it ended with, if any. A method for which there are no arguments here is
called without any, or is only looked at, if it is a property.
"""

import asyncio
import inspect
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

LIMIT_S = 20.0
BASE = "holdfast/tiny"
TOKENS = [1, 10, 11]
LAST = (
    "forward_backward_contrastive_async",
    "unload_model",
    "delete_training_session",
    "close",
)
"""Called when everything else has been: what ends something, or stalls the library itself."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Calls = dict[str, Callable[[Any], Arguments]]
"""What methods are called with, by their names: `method`, or `Class.method` of one class."""


def with_(*args: Any, **kwargs: Any) -> Arguments:
    """The arguments of a call."""
    return args, kwargs


def settled(value: Any) -> Any:
    """What a call comes to, however it gives its result."""
    if hasattr(value, "result"):
        return value.result(LIMIT_S)
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return settled(asyncio.run(asyncio.wait_for(wait(), LIMIT_S)))
    return value


COMMON: Calls = {
    "forward forward_backward": lambda it: with_(it.data(), "cross_entropy"),
    "forward_backward_custom": lambda it: with_(it.data(), lambda _, now: (-now[0].sum(), {})),
    "optim_step": lambda it: with_(it.types.AdamParams(learning_rate=1e-4)),
    "save_state save_weights_for_sampler save_weights_external": lambda it: with_(it.fresh()),
    "load_state load_state_with_optimizer get_weights_info_by_tinker_path": (
        lambda it: with_(it.saved())
    ),
    "create_training_client_from_state create_training_client_from_state_with_optimizer": (
        lambda it: with_(it.saved())
    ),
    "create_lora_training_client": lambda _: with_(base_model=BASE, rank=4),
    "sample": lambda it: with_(it.prompt(), 1, it.types.SamplingParams(max_tokens=2)),
    "compute_logprobs": lambda it: with_(it.prompt()),
    "from_sampler_handle": lambda it: with_(it.sampler().get_sampler_handle(), api_key=it.key),
    "on_queue_state_change": lambda it: with_(it.futures.QueueState.ACTIVE, None),
}


class Library:
    """The classes of a library, an object of each, and what to call their methods with."""

    types: Any
    futures: Any
    """The library's module of that name."""
    model: Any

    def __init__(self, calls: Calls) -> None:
        self.counter = itertools.count()
        self.url, self.key = os.environ["HOUSE_URL"], os.environ["HOUSE_KEY"]
        self.objects: dict[str, Any] = {}
        self.calls = {
            name: call for names, call in (COMMON | calls).items() for name in names.split()
        }

    def fresh(self) -> str:
        """A name that was not used yet."""
        return f"fresh-{next(self.counter)}"

    def prompt(self) -> Any:
        return self.types.ModelInput.from_ints(TOKENS)

    def sampler(self) -> Any:
        return self.objects["SamplingClient"]

    def data(self) -> list[Any]:
        count = len(TOKENS)
        inputs = {
            "target_tokens": self.types.TensorData(data=TOKENS, dtype="int64", shape=[count]),
            "weights": self.types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
        }
        return [self.types.Datum(model_input=self.prompt(), loss_fn_inputs=inputs)]

    def saved(self) -> str:
        """The path of a checkpoint."""
        return str(self.model.save_state(self.fresh()).result(LIMIT_S).path)

    def published(self) -> str:
        """The path of weights for samplers."""
        return str(self.model.save_weights_for_sampler(self.fresh()).result(LIMIT_S).path)

    def arguments(self, owner: str, name: str) -> Arguments:
        """What to call a method with; an asynchronous one takes what the other one takes."""
        plain = name.removesuffix("_async")
        found = self.calls.get(f"{owner}.{plain}") or self.calls.get(plain)
        return with_() if found is None else found(self)

    def call(self, owner: str, name: str) -> dict[str, Any]:
        """Call one, or look at it; what came of it."""
        said: dict[str, Any] = {"name": f"{owner}.{name}", "error": "hangs", "text": ""}
        args, kwargs = self.arguments(owner, name)

        def there() -> None:
            try:
                member = getattr(self.objects[owner], name)
                if callable(member):
                    settled(member(*args, **kwargs))
                said["error"] = None
            except Exception as error:  # noqa: BLE001 -- told to the test
                said.update(error=type(error).__name__, text=str(error)[:1000])

        began = time.monotonic()
        thread = threading.Thread(target=there, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        return said | {"took_s": time.monotonic() - began}

    def run(self) -> None:
        """Call all of them."""
        every = [
            (LAST.index(name) if name in LAST else -1, owner, name)
            for owner, one in self.objects.items()
            for name in dir(type(one))
            if not name.startswith("_")
        ]
        for _, owner, name in sorted(every):
            print(json.dumps(self.call(owner, name)), flush=True)


TINKER: Calls = {
    "ServiceClient.close": lambda _: with_("success"),
    "ServiceClient.copy_weights": lambda it: with_(it.saved()),
    "RestClient.copy_weights": lambda it: with_(it.saved(), "p"),
    "create_custom_loss": (
        lambda _: with_(lambda inputs: inputs["logprobs"].sum(), {"weights": 1})
    ),
    "create_sampling_client": lambda it: with_(model_path=it.published()),
    "create": lambda it: with_(it.service.holder, base_model=BASE),
    "get_training_run list_checkpoints": lambda it: with_(it.model.model_id),
    "get_training_run_by_tinker_path delete_checkpoint_from_tinker_path": (
        lambda it: with_(it.saved())
    ),
    "publish_checkpoint_from_tinker_path unpublish_checkpoint_from_tinker_path": (
        lambda it: with_(it.saved())
    ),
    "get_external_weights_urls": (
        lambda it: with_(f"tinker://{it.model.model_id}/external_weights/x")
    ),
    "delete_checkpoint": lambda it: with_(it.model.model_id, it.saved().rpartition("/")[2]),
    "set_checkpoint_ttl_from_tinker_path": lambda it: with_(it.saved(), 3600),
    "get_session export_session_trace": lambda it: with_(it.service.holder.get_session_id()),
    "assign_session_project": lambda it: with_(it.service.holder.get_session_id(), "p"),
    "get_sampler": lambda it: with_(it.sampler()._sampling_session_id),
    "search_sessions": lambda it: with_(it.types.SessionSearchRequest()),
    "get_billing_usage": lambda _: with_("2026-01-01", "2026-01-02"),
}


class Tinker(Library):
    """`tinker`."""

    def __init__(self) -> None:
        super().__init__(TINKER)
        os.environ["TINKER_PROJECT_ID"] = "p"  # ServiceClient.copy_weights asks for one
        tinker = import_module("tinker")
        self.types, self.futures = tinker.types, import_module("tinker.lib.api_future_impl")
        self.service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        self.model = self.service.create_lora_training_client(base_model=BASE, rank=4)
        self.objects = {
            "ServiceClient": self.service,
            "TrainingClient": self.model,
            "SamplingClient": self.model.save_weights_and_get_sampling_client(),
            "RestClient": self.service.create_rest_client(),
            "AdminClient": tinker.AdminClient(base_url=self.url, api_key=self.key),
        }


FIREWORKS: Calls = {
    "load_adapter create_sampling_client": lambda it: with_(it.published()),
    "create_deployment_sampler hotload_sampler_snapshot": lambda it: with_(it.published()),
    "create": lambda it: with_(inference_url=it.url, model=BASE, api_key=it.key),
    "create_base_training_client create_deployment_sampler_for_model": lambda _: with_(BASE),
    "create_reference_client": lambda _: with_(BASE, lora_rank=4),
    "create_training_client": lambda _: with_(base_model=BASE, lora_rank=8),
    "create_lora_training_client": (lambda it: with_(base_model=BASE, rank=16 + next(it.counter))),
    "create_inference_deployment_sampler": (
        lambda it: with_(it.sdk.DeploymentConfig(deployment_id="d", base_model=BASE))
    ),
    "from_firetitan_config": (lambda it: with_(base_model=BASE, api_key=it.key, base_url=it.url)),
    "ServiceClient.list_checkpoints": lambda _: with_("one"),
    "promote_checkpoint": lambda it: with_("one", it.saved(), "promoted"),
    "resolve_checkpoint_path": lambda _: with_("x"),
    "save_weights_for_sampler_ext": lambda it: with_(it.fresh()),
    "forward_projection": lambda it: with_(it.data()),
    "forward_backward_contrastive": (
        lambda it: with_(it.data() * 2, num_queries=1, temperature=1.0)
    ),
}


class Fireworks(Library):
    """`fireworks-ai`. Its samplers are deployments: it refuses itself what belongs to those."""

    def __init__(self) -> None:
        super().__init__(FIREWORKS)
        self.sdk = sdk = import_module("fireworks.training.sdk")
        self.types = sdk.types
        self.futures = import_module("fireworks.training.sdk._core.lib.api_future_impl")
        self.service = sdk.FiretitanServiceClient(base_url=self.url, api_key=self.key)
        self.model = self.service.create_training_client(base_model=BASE, lora_rank=4)
        args, kwargs = self.arguments("SamplingClient", "create")
        self.objects = {
            "ServiceClient": self.service,
            "TrainingClient": self.model,
            "SamplingClient": sdk.FiretitanSamplingClient.create(*args, **kwargs),
            "RestClient": self.service.create_rest_client(),
        }

    def saved(self) -> str:
        """A name alone: paths with a scheme are not for this library."""
        return super().saved().rpartition("/")[2]


def main() -> None:
    """Call everything of the library that the environment names."""
    warnings.simplefilter("ignore")
    {"tinker": Tinker, "fireworks": Fireworks}[os.environ["LIBRARY"]]().run()


if __name__ == "__main__":
    main()
