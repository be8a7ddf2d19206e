"""What goes wrong is told in the client's own errors, and hurts nobody.

A bad operation uses its number up and changes nothing: every model here has a twin that never
saw the bad ones, and both end with the same bits.
"""

from typing import Any

import pytest

from trainer.house import House
from trainer.sdk.programs import run
from trainer.sdk.saved import digest

TOOLS = """
import math
def one(tokens=(1, 10, 11), **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)
GOOD = {"target_tokens": [10, 11, 2], "weights": [1.0, 1.0, 1.0]}
OLD = {"target_tokens": [10, 11, 2], "advantages": [1.0, 1.0, 1.0]}
"""

OPERATIONS = """
client, twin = lora(), lora()
def back(name, *data, loss="cross_entropy", config=None):
    attempt(name, lambda: client.forward_backward(list(data), loss, config).result())
def bad_data():
    back("unknown loss", one(**GOOD), loss="nonsense")
    back("custom loss", one(**GOOD), loss="custom")
    back("unknown config", one(**GOOD), config={"nonsense": 1.0})
    back("missing config", one(**OLD, logprobs=[-1.0] * 3), loss="dro")
    back("missing input", one(**GOOD), loss="ppo")
    back("short weights", one(target_tokens=[10, 11, 2], weights=[1.0]))
    back("short targets", one(target_tokens=[10, 11]))
    back("no targets", one(weights=[1.0] * 3))
    back("no tokens", one((), target_tokens=[]))
    back("token too large", one((1, 10, 101), **GOOD))
    back("token negative", one((1, 10, -1), **GOOD))
    back("target too large", one(target_tokens=[10, 11, 101]))
    back("nan", one(target_tokens=[10, 11, 2], weights=[1.0, math.nan, 1.0]))
    back("inf", one(target_tokens=[10, 11, 2], weights=[1.0, math.inf, 1.0]))
    back("loss overflows", one(target_tokens=[10, 11, 2], weights=[3e38] * 3))
    back("ratio overflows", one(**OLD, logprobs=[-300.0] * 3), loss="importance_sampling")
    back("gradient overflows", one(target_tokens=[10, 10, 10], weights=[1e38, -1e38, 0.0]))
    attempt("forward overflows", lambda: client.forward(
        [one(target_tokens=[10, 11, 2], weights=[3e38] * 3)], "cross_entropy").result())
    back("too long", one([1] * 513, target_tokens=[10] * 513))
    back("one of several", one(**GOOD), one(target_tokens=[10, 11]))
def bad_steps():
    for name, params in {
        "rate negative": {"learning_rate": -1.0}, "rate nan": {"learning_rate": math.nan},
        "rate inf": {"learning_rate": math.inf}, "beta 1": {"beta1": 1.0},
        "eps 0": {"eps": 0.0}, "clip negative": {"grad_clip_norm": -1.0},
    }.items():
        attempt(name, lambda: client.optim_step(types.AdamParams(**params)).result())
    attempt("dimuon", lambda: client.optim_step(types.DimuonParams(learning_rate=1.0)).result())
def bad_names():
    for name in ("../../etc", "..", "/etc/passwd", "a/b", "", "x" * 129, "a b", ".hidden"):
        attempt(f"save {name[:20]}", lambda: client.save_state(name).result())
        attempt(f"publish {name[:20]}", lambda: client.save_weights_for_sampler(name).result())
    for path in ("tinker://../../etc", "../../etc", "tinker://../weights/etc", "/etc/passwd",
                 f"tinker://{client.model_id}/weights/../x", f"tinker://{client.model_id}/x/y",
                 f"tinker://{client.model_id}/weights/never", "tinker://nobody/weights/x"):
        attempt(f"load {path[-24:]}", lambda: client.load_state(path).result())
    client.save_weights_for_sampler("kept").result()
    attempt("no optimizer", lambda: client.load_state_with_optimizer(
        f"tinker://{client.model_id}/sampler_weights/kept").result())
    attempt("published twice", lambda: client.save_weights_for_sampler("kept").result())
    client.save_state("state").result()
    attempt("saved twice", lambda: client.save_state("state").result())
    other = lora(rank=8)
    other.save_state("other").result()
    attempt("another rank", lambda: client.load_state(
        f"tinker://{other.model_id}/weights/other").result())
def good(which):
    which.forward_backward([datum("first")], "cross_entropy").result()
def end(which):
    which.optim_step(types.AdamParams(learning_rate=1e-2)).result()
step(client, "begin"); step(twin, "begin")
good(client); good(twin)
bad_data(); bad_steps(); bad_names()
good(client); good(twin)
bad_data()
end(client); end(twin)
bad_steps()
step(client, "more"); step(twin, "more")
say(path=client.save_state("end").result().path, twin=twin.save_state("end").result().path)
"""


@pytest.fixture(scope="module")
def told(there: House) -> list[dict[str, Any]]:
    """Everything that one model was asked for in vain, and what became of it and its twin."""
    return run(there, TOOLS + OPERATIONS)


def test_a_bad_operation_is_the_users_fault(told: list[dict[str, Any]]) -> None:
    """`RequestFailedError` of category user, for every one, within the operation's own result."""
    bad = told[:-1]
    assert len(bad) > 60
    for one in bad:
        assert (one["error"], one["category"]) == ("RequestFailedError", "user"), one


def test_a_bad_operation_changes_nothing(there: House, told: list[dict[str, Any]]) -> None:
    """Weights, moments and pending gradients are those of the twin, bit for bit."""
    assert digest(there, told[-1]["path"]) == digest(there, told[-1]["twin"])


def test_errors_say_what_to_do(told: list[dict[str, Any]]) -> None:
    """The message names what was wrong."""
    words = {
        "unknown loss": "'nonsense' is not supported: there are cross_entropy",
        "short weights": "datum 0: `weights` has shape [1]",
        "one of several": "datum 1: `target_tokens` has shape [2]",
        "token too large": "the vocabulary has 101",
        "nan": "`weights` has nan at 1",
        "too long": "513 tokens; 1 to 512",
        "saved twice": "overwrite",
        "dimuon": "adamw",
    }
    said = {one["name"]: one["text"] for one in told[:-1]}
    for name, text in words.items():
        assert text in said[name], said[name]


REQUESTS = """
from tinker.lib.api_future_impl import _APIFuture
client = lora()
attempt("base", lambda: service.create_lora_training_client(base_model="no/such", rank=4))
attempt("rank", lambda: lora(rank=2000))
attempt("rank below", lambda: lora(rank=-1))
for name, path in {
    "never saved": "tinker://nobody/weights/x", "climbing": "tinker://../../etc",
    "climbing further": "tinker://../weights/..", "long": "tinker://" + "x" * 900,
}.items():
    attempt(f"from {name}", lambda: service.create_training_client_from_state(path))
    attempt(f"sampler {name}", lambda: service.create_sampling_client(model_path=path))
attempt("from a file", lambda: service.create_training_client_from_state("../../etc/passwd"))
attempt("sampler base", lambda: service.create_sampling_client(base_model="no/such"))
sampler = service.create_sampling_client(base_model=BASE)
def ask(name, prompt=(1,), n=1, **params):
    attempt(name, lambda: sampler.sample(
        prompt=types.ModelInput.from_ints(list(prompt)), num_samples=n,
        sampling_params=types.SamplingParams(**params)).result())
ask("prompt full", [1] * 512, max_tokens=1)
ask("prompt long", [1] * 600, max_tokens=1)
ask("prompt token", [101], max_tokens=1)
ask("stop token", max_tokens=1, stop=[101])
ask("cold", max_tokens=1, temperature=-1.0)
ask("no nucleus", max_tokens=1, top_p=0.0)
ask("no samples", n=0, max_tokens=1)
ask("no prompt", [], max_tokens=1)
def future(promise):
    waiting = _APIFuture(types.OptimStepResponse, service.holder,
        types.UntypedAPIFuture(request_id=promise), request_start_time=time.time(),
        request_type="OptimStep")
    return waiting.result()
for name, promise in {
    "number": f"{client.model_id}:77", "model": "nobody:1", "words": "never promised",
    "climbing": "../../etc:1", "huge": f"{client.model_id}:{'9' * 30}"}.items():
    attempt(f"future {name}", lambda: future(promise))
ask("good", max_tokens=3)
step(client, "good")
"""


@pytest.fixture(scope="module")
def refused(there: House) -> dict[str, Any]:
    """What was refused outside of any model's line of operations."""
    return {one["name"]: one for one in run(there, TOOLS + REQUESTS)}


@pytest.mark.parametrize(
    ("error", "names"),
    [
        ("NotFoundError", ["from never saved", "sampler never saved", "sampler base"]),
        ("BadRequestError", ["from climbing", "sampler climbing", "from climbing further"]),
        ("BadRequestError", ["sampler climbing further", "from long", "sampler long"]),
        ("BadRequestError", ["from a file"]),
        ("BadRequestError", ["rank below", "cold", "no nucleus", "no samples", "no prompt"]),
        ("RequestFailedError", ["base", "rank"]),
        ("RequestFailedError", ["prompt full", "prompt long", "prompt token", "stop token"]),
        ("ValueError", ["future number", "future model", "future words"]),
        ("ValueError", ["future climbing", "future huge"]),
        (None, ["good"]),
    ],
)
def test_a_bad_request_has_its_error(
    refused: dict[str, Any], error: str | None, names: list[str]
) -> None:
    """Never saved: not found. Not a path: bad request. Never promised: ValueError."""
    for name in names:
        said = refused[name]
        assert said["error"] == error, said
        if error == "RequestFailedError":
            assert said["category"] == "user", said


UNLOADED = """
from fireworks.training.sdk import FiretitanServiceClient
fireworks = FiretitanServiceClient(
    base_url=os.environ["HOUSE_URL"], api_key=os.environ["HOUSE_KEY"])
gone = fireworks.create_training_client(base_model=BASE, lora_rank=4)
path = gone.save_state("kept").result().path
say(first=gone.unload_model().result().model_id, second=gone.unload_model().result().model_id,
    model=gone.model_id)
from tinker.lib.public_interfaces.training_client import TrainingClient
again = TrainingClient(service.holder, model_seq_id=0, model_id=gone.model_id)
again._request_id_counter = again._turn_counter = 7  # as if it had gone on with its numbers
attempt("operation", lambda: step(again, "too late"))
attempt("save", lambda: again.save_state("late").result())
attempt("info", lambda: again.get_info())
attempt("unknown", lambda: TrainingClient(
    service.holder, model_seq_id=0, model_id="nobody").get_info())
attempt("unknown step", lambda: step(TrainingClient(
    service.holder, model_seq_id=0, model_id="nobody"), "x"))
attempt("its save", lambda: step(service.create_training_client_from_state(path), "on"))
"""


def test_a_model_that_was_unloaded(there: House) -> None:
    """Unloading twice is unloading once; whatever is asked of it later is gone, at once; what
    was saved of it stays. A model that never was is not found.
    """
    first, *rest = run(there, UNLOADED)
    assert first["first"] == first["second"] == first["model"]
    said = {one["name"]: one for one in rest}
    for name in ("operation", "save", "info"):
        assert (said[name]["error"], said[name]["status"]) == ("APIStatusError", 410), said[name]
    for name in ("unknown", "unknown step"):
        assert said[name]["error"] == "NotFoundError", said[name]
    assert said["its save"]["error"] is None, said["its save"]


NAMES = """
client = lora()
for length in (60, 79, 80, 100):
    attempt(str(length), lambda: client.save_state("n" * length).result())
"""


@pytest.mark.long
def test_a_long_name_is_kept_or_refused(there: House) -> None:
    """Names of a hundred characters: whatever cannot be kept is the user's error, not a crash."""
    for one in run(there, NAMES):
        assert one["error"] is None or one["category"] == "user", one
