"""An operation that kills every trainer that tries it: given up, and nothing else suffers.

The cause is a real one: it needs more memory than the process may have.
"""

import shlex
import sys
from pathlib import Path

import pytest

from trainer.house import house
from trainer.kills.story import POLICY

SCRIPT = Path(__file__).parent / "cramped.py"
ROOM_MIB = 560
"""Enough for all that is usual; one batch of the bad operation takes 800."""
PROGRAM = """
import logging
logging.disable(logging.CRITICAL)
client = service.create_lora_training_client(base_model=BASE, rank=8, seed=7)
adam = types.AdamParams(learning_rate=1e-2)

def step(text):
    first = client.forward_backward([datum(text)], "cross_entropy")
    second = client.optim_step(adam)
    return lambda: say(metrics=first.result().metrics, norm=second.result().metrics)

for text in ("one", "two", "three"):
    step(text)()
if os.environ.get("POISON"):
    bad = client.forward_backward([datum("x" * 500) for _ in range(128)], "cross_entropy")
after = [step(text) for text in ("four", "five", "six", "seven")]
if os.environ.get("POISON"):
    try:
        bad.result()
        say(error="none")
    except tinker.RequestFailedError as error:
        print(json.dumps({"category": error.category.value, "error": str(error)}), flush=True)
for hear in after:
    hear()
say(path=client.save_state("final").result().path.partition("/weights/")[2])
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_operation_that_kills_is_given_up(tmp_path: Path) -> None:
    """Its caller hears so, with category `server`; it had no effect; what follows goes on."""
    command = shlex.join(["env", "MALLOC_ARENA_MAX=2", sys.executable, str(SCRIPT), str(ROOM_MIB)])
    with house(tmp_path, "--trainer", f"default={command}", policy=POLICY) as there:
        without = there.run(PROGRAM)
        assert there.epoch() == 1, there.log()
        lines = there.run(PROGRAM, limit_s=150, POISON="1")
        epochs, log = there.epoch(), there.log()
    poison = [line for line in lines if "category" in line]
    assert [line["category"] for line in poison] == ["server"], (lines, log)
    assert "3 trainers died" in poison[0]["error"]
    assert [line for line in lines if line not in poison] == without
    # Where there is so little memory, something else may have died of it, too.
    assert 4 <= epochs <= 6, f"three deaths, not {epochs - 1}: {log}"
