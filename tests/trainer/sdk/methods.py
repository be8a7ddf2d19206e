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


class Library:
    """The classes of a library, an object of each, and what to call their methods with."""

    def __init__(self) -> None:
        self.counter = itertools.count()
        self.url, self.key = os.environ["HOUSE_URL"], os.environ["HOUSE_KEY"]
        self.objects: dict[str, Any] = {}

    def fresh(self) -> str:
        """A name that was not used yet."""
        return f"fresh-{next(self.counter)}"

    def arguments(self, owner: str, name: str) -> Arguments:
        """What to call a method with; an asynchronous one takes what the other one takes."""
        plain = name.removesuffix("_async")
        found = getattr(self, f"{owner}_{plain}", None) or getattr(self, f"any_{plain}", None)
        return with_() if found is None else found()

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


class Training(Library):
    """What both libraries have in common."""

    types: Any

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def data(self) -> list[Any]:
        count = len(TOKENS)
        inputs = {
            "target_tokens": self.types.TensorData(data=TOKENS, dtype="int64", shape=[count]),
            "weights": self.types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
        }
        prompt = self.types.ModelInput.from_ints(TOKENS)
        return [self.types.Datum(model_input=prompt, loss_fn_inputs=inputs)]

    def saved(self) -> str:
        """The path of a checkpoint."""
        return str(self.model.save_state(self.fresh()).result(LIMIT_S).path)

    def any_forward(self) -> Arguments:
        return with_(self.data(), "cross_entropy")

    any_forward_backward = any_forward

    def any_forward_backward_custom(self) -> Arguments:
        return with_(self.data(), lambda _data, logprobs: (-logprobs[0].sum(), {}))

    def any_optim_step(self) -> Arguments:
        return with_(self.types.AdamParams(learning_rate=1e-4))

    def any_save_state(self) -> Arguments:
        return with_(self.fresh())

    any_save_weights_for_sampler = any_save_state
    any_save_weights_external = any_save_state

    def any_load_state(self) -> Arguments:
        return with_(self.saved())

    any_load_state_with_optimizer = any_load_state
    any_create_training_client_from_state = any_load_state
    any_create_training_client_from_state_with_optimizer = any_load_state
    any_get_weights_info_by_tinker_path = any_load_state

    def any_create_lora_training_client(self) -> Arguments:
        return with_(base_model=BASE, rank=4)

    def any_sample(self) -> Arguments:
        params = self.types.SamplingParams(max_tokens=2)
        return with_(self.types.ModelInput.from_ints(TOKENS), 1, params)

    def any_compute_logprobs(self) -> Arguments:
        return with_(self.types.ModelInput.from_ints(TOKENS))


class Tinker(Training):
    """`tinker`."""

    def __init__(self) -> None:
        super().__init__()
        tinker = import_module("tinker")
        self.types = tinker.types
        self.tinker = tinker
        self.service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        self.model = self.service.create_lora_training_client(base_model=BASE, rank=4)
        sampler = self.model.save_weights_and_get_sampling_client()
        self.objects = {
            "ServiceClient": self.service,
            "TrainingClient": self.model,
            "SamplingClient": sampler,
            "RestClient": self.service.create_rest_client(),
            "AdminClient": tinker.AdminClient(base_url=self.url, api_key=self.key),
        }

    def ServiceClient_close(self) -> Arguments:  # noqa: N802 -- the class's name
        return with_("success")

    def ServiceClient_copy_weights(self) -> Arguments:  # noqa: N802
        os.environ["TINKER_PROJECT_ID"] = "p"
        return with_(self.saved())

    def RestClient_copy_weights(self) -> Arguments:  # noqa: N802
        return with_(self.saved(), "p")

    def any_create_custom_loss(self) -> Arguments:
        return with_(lambda inputs: inputs["logprobs"].sum(), {"weights": 1})

    def any_create_sampling_client(self) -> Arguments:
        return with_(model_path=self.model.save_weights_for_sampler(self.fresh()).result().path)

    def any_create(self) -> Arguments:
        return with_(self.service.holder, base_model=BASE)

    def any_from_sampler_handle(self) -> Arguments:
        return with_(self.objects["SamplingClient"].get_sampler_handle(), api_key=self.key)

    def any_on_queue_state_change(self) -> Arguments:
        state = import_module("tinker.lib.api_future_impl").QueueState.ACTIVE
        return with_(state, None)

    def any_get_training_run(self) -> Arguments:
        return with_(self.model.model_id)

    any_list_checkpoints = any_get_training_run

    def any_get_training_run_by_tinker_path(self) -> Arguments:
        return with_(self.saved())

    any_delete_checkpoint_from_tinker_path = any_get_training_run_by_tinker_path
    any_publish_checkpoint_from_tinker_path = any_get_training_run_by_tinker_path
    any_unpublish_checkpoint_from_tinker_path = any_get_training_run_by_tinker_path

    def any_get_external_weights_urls(self) -> Arguments:
        return with_(f"tinker://{self.model.model_id}/external_weights/x")

    def any_delete_checkpoint(self) -> Arguments:
        return with_(self.model.model_id, self.saved().rpartition("/")[2])

    def any_set_checkpoint_ttl_from_tinker_path(self) -> Arguments:
        return with_(self.saved(), 3600)

    def any_get_session(self) -> Arguments:
        return with_(self.service.holder.get_session_id())

    any_export_session_trace = any_get_session

    def any_assign_session_project(self) -> Arguments:
        return with_(self.service.holder.get_session_id(), "p")

    def any_get_sampler(self) -> Arguments:
        return with_(self.objects["SamplingClient"]._sampling_session_id)

    def any_search_sessions(self) -> Arguments:
        return with_(self.types.SessionSearchRequest())

    def any_get_billing_usage(self) -> Arguments:
        return with_("2026-01-01", "2026-01-02")


class Fireworks(Training):
    """`fireworks-ai`. Its samplers are deployments: it refuses itself what belongs to those."""

    def __init__(self) -> None:
        super().__init__()
        sdk = import_module("fireworks.training.sdk")
        self.types = sdk.types
        self.sdk = sdk
        self.service = sdk.FiretitanServiceClient(base_url=self.url, api_key=self.key)
        self.model = self.service.create_training_client(base_model=BASE, lora_rank=4)
        args, kwargs = self.any_create()
        self.objects = {
            "ServiceClient": self.service,
            "TrainingClient": self.model,
            "SamplingClient": sdk.FiretitanSamplingClient.create(*args, **kwargs),
            "RestClient": self.service.create_rest_client(),
        }

    def saved(self) -> str:
        """A name alone: paths with a scheme are not for this library."""
        return super().saved().rpartition("/")[2]

    def published(self) -> str:
        return str(self.model.save_weights_for_sampler(self.fresh()).result(LIMIT_S).path)

    def any_load_adapter(self) -> Arguments:
        return with_(self.published())

    any_create_sampling_client = any_load_adapter
    any_create_deployment_sampler = any_load_adapter
    any_hotload_sampler_snapshot = any_load_adapter

    def any_create(self) -> Arguments:
        return with_(inference_url=self.url, model=BASE, api_key=self.key)

    def any_from_sampler_handle(self) -> Arguments:
        return with_(self.objects["SamplingClient"].get_sampler_handle(), api_key=self.key)

    def any_on_queue_state_change(self) -> Arguments:
        module = "fireworks.training.sdk._core.lib.api_future_impl"
        return with_(import_module(module).QueueState.ACTIVE, None)

    def any_create_base_training_client(self) -> Arguments:
        return with_(BASE)

    any_create_deployment_sampler_for_model = any_create_base_training_client

    def any_create_reference_client(self) -> Arguments:
        return with_(BASE, lora_rank=4)

    def any_create_training_client(self) -> Arguments:
        return with_(base_model=BASE, lora_rank=8)

    def any_create_lora_training_client(self) -> Arguments:
        return with_(base_model=BASE, rank=16 + next(self.counter))

    def any_create_inference_deployment_sampler(self) -> Arguments:
        return with_(self.sdk.DeploymentConfig(deployment_id="d", base_model=BASE))

    def any_from_firetitan_config(self) -> Arguments:
        return with_(base_model=BASE, api_key=self.key, base_url=self.url)

    def ServiceClient_list_checkpoints(self) -> Arguments:  # noqa: N802 -- the class's name
        return with_("one")

    def any_promote_checkpoint(self) -> Arguments:
        return with_("one", self.saved(), "promoted")

    def any_resolve_checkpoint_path(self) -> Arguments:
        return with_("x")

    def any_save_weights_for_sampler_ext(self) -> Arguments:
        return with_(self.fresh())

    def any_forward_projection(self) -> Arguments:
        return with_(self.data())

    def any_forward_backward_contrastive(self) -> Arguments:
        return with_(self.data() * 2, num_queries=1, temperature=1.0)


def main() -> None:
    """Call everything of the library that the environment names."""
    warnings.simplefilter("ignore")
    {"tinker": Tinker, "fireworks": Fireworks}[os.environ["LIBRARY"]]().run()


if __name__ == "__main__":
    main()
