"""The process behind the engine of `test_loss.py`: holds one version, and another aside.

Reads one JSON line per call, answers with one. `fragile` names a call in which it kills itself.
"""

import json
import os
import signal
import sys
from pathlib import Path

import safetensors.numpy


def main(fragile: str) -> None:
    """Answer until the input ends."""
    aside = held = 0.0
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == fragile:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked["do"] == "stage":
            [file] = Path(asked["path"]).glob("*.safetensors")
            aside = float(safetensors.numpy.load_file(file)["w"].sum())
        elif asked["do"] == "switch":
            held, aside = aside, 0.0
        print(json.dumps({"what": asked["do"], "held": held}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
