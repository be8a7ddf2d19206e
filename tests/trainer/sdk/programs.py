"""What the clients' programs have in common, beside the prelude of the house.

A program finds `GIVEN` (what the test gave it), `made` (data from plain lists), `train` (a few
steps that are the same every time), `attempt` (say what came of something, error or not). At its
end its session is closed, so that its models do not take the room of others.
"""

import json
from typing import Any

from trainer.house import House

TOOLS = """
import warnings
warnings.simplefilter("ignore")  # of what is deprecated, and tested all the same
GIVEN = json.loads(os.environ.get("GIVEN", "null"))
def made(data, names=None):
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(one["tokens"]),
            loss_fn_inputs={
                name: value for name, value in one.items()
                if name != "tokens" and (names is None or name in names)
            },
        )
        for one in data
    ]
def lora(seed=7, rank=4):
    return service.create_lora_training_client(base_model=BASE, rank=rank, seed=seed)
def step(client, *texts, rate=5e-3, types=types):
    first = client.forward_backward([datum(text, types) for text in texts], "cross_entropy")
    second = client.optim_step(types.AdamParams(learning_rate=rate))
    return first.result().metrics["loss:sum"], second.result().metrics["grad_norm:mean"]
def published(client, name="end"):
    return client.save_weights_for_sampler(name).result().path
def attempt(name, call):
    try:
        call()
    except Exception as error:
        category = getattr(error, "category", None)
        say(name=name, error=type(error).__name__, text=str(error),
            category=None if category is None else category.value,
            status=getattr(error, "status_code", None))
    else:
        say(name=name, error=None)
"""

END_WELL = """
service.close("success").result()
"""


def run(there: House, text: str, given: Any = None, **env: str) -> list[dict[str, Any]]:
    """Run a program to its end; what it said."""
    with there.program(TOOLS + text + END_WELL, GIVEN=json.dumps(given), **env) as program:
        return program.finish()
