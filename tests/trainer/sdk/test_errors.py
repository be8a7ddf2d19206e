"""What goes wrong is told in the client's own errors, and hurts nobody.

A bad operation uses its number up and changes nothing: every model here has a twin that never
saw the bad ones, and both end with the same bits. What else can be wrong with an operation, and
what its message says, is in `wire/test_requests.py` and `test_loss_inputs.py`.
"""

from trainer.house import House
from trainer.sdk.programs import run
from trainer.sdk.saved import digest

OPERATIONS = """
import math
def one(tokens=(1, 10, 11), **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)
GOOD = {"target_tokens": [10, 11, 2], "weights": [1.0, 1.0, 1.0]}
client, twin = lora(), lora()
def back(name, *data, loss="cross_entropy"):
    attempt(name, lambda: client.forward_backward(list(data), loss).result())
def bad_data():
    back("unknown loss", one(**GOOD), loss="nonsense")
    back("token too large", one((1, 10, 101), **GOOD))
    back("nan", one(target_tokens=[10, 11, 2], weights=[1.0, math.nan, 1.0]))
    back("one of several", one(**GOOD), one(target_tokens=[10, 11]))
    back("loss overflows", one(target_tokens=[10, 11, 2], weights=[3e38] * 3))
    back("gradient overflows", one(target_tokens=[10, 10, 10], weights=[1e38, -1e38, 0.0]))
    attempt("forward overflows", lambda: client.forward(
        [one(target_tokens=[10, 11, 2], weights=[3e38] * 3)], "cross_entropy").result())
def bad_steps():
    for name, params in {
        "rate": types.AdamParams(learning_rate=math.nan),
        "dimuon": types.DimuonParams(learning_rate=1.0),
    }.items():
        attempt(name, lambda: client.optim_step(params).result())
def bad_names():
    attempt("save", lambda: client.save_state("../../etc").result())
    attempt("publish", lambda: client.save_weights_for_sampler("../../etc").result())
    for path in ("tinker://../weights/etc", "/etc/passwd", "tinker://nobody/weights/x",
                 f"tinker://{client.model_id}/weights/never"):
        attempt(f"load {path}", lambda: client.load_state(path).result())
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


def test_a_bad_operation_is_the_users_fault_and_changes_nothing(there: House) -> None:
    """`RequestFailedError` of category user, for every one, within the operation's own result;
    weights, moments and pending gradients are those of the twin, bit for bit."""
    *bad, ends = run(there, OPERATIONS)
    assert len(bad) == 28
    for one in bad:
        assert (one["error"], one["category"]) == ("RequestFailedError", "user"), one
    assert digest(there, ends["path"]) == digest(there, ends["twin"])


REQUESTS = """
from tinker.lib.api_future_impl import _APIFuture
client = lora()
attempt("base", lambda: service.create_lora_training_client(base_model="no/such", rank=4))
attempt("rank", lambda: lora(rank=2000))
attempt("rank below", lambda: lora(rank=-1))
for name, path in {"never saved": "tinker://nobody/weights/x", "climbing": "tinker://../../etc",
                   "long": "tinker://" + "x" * 900}.items():
    attempt(f"from {name}", lambda: service.create_training_client_from_state(path))
    attempt(f"sampler {name}", lambda: service.create_sampling_client(model_path=path))
attempt("sampler base", lambda: service.create_sampling_client(base_model="no/such"))
sampler = service.create_sampling_client(base_model=BASE)
def ask(name, prompt=(1,), **params):
    attempt(name, lambda: sampler.sample(
        prompt=types.ModelInput.from_ints(list(prompt)), num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1, **params)).result())
ask("prompt full", [1] * 512)
ask("prompt token", [101])
ask("stop token", stop=[101])
ask("cold", temperature=-1.0)
def future(promise):
    waiting = _APIFuture(types.OptimStepResponse, service.holder,
        types.UntypedAPIFuture(request_id=promise), request_start_time=time.time(),
        request_type="OptimStep")
    return waiting.result()
for name, promise in {
    "number": f"{client.model_id}:77", "words": "never promised", "climbing": "../../etc:1",
    "huge": f"{client.model_id}:{'9' * 30}"}.items():
    attempt(f"future {name}", lambda: future(promise))
ask("good")
step(client, "good")
"""
LONG_OR_CLIMBING = ["from climbing", "sampler climbing", "from long", "sampler long"]
REFUSED: dict[str | None, list[str]] = {
    "NotFoundError": ["from never saved", "sampler never saved", "sampler base"],
    "BadRequestError": ["rank below", "cold", *LONG_OR_CLIMBING],
    "RequestFailedError": ["base", "rank", "prompt full", "prompt token", "stop token"],
    "ValueError": ["future number", "future words", "future climbing", "future huge"],
    None: ["good"],
}


def test_a_bad_request_has_its_error(there: House) -> None:
    """Never saved: not found. Not a path: bad request. Never promised: ValueError."""
    told = {one["name"]: one for one in run(there, REQUESTS)}
    wanted = {name: error for error, names in REFUSED.items() for name in names}
    assert {name: one["error"] for name, one in told.items()} == wanted
    for name in REFUSED["RequestFailedError"]:
        assert told[name]["category"] == "user", told[name]
