"""Goodput of a run: useful steps per minute in a storm against calm, and what each fault costs.

    python -m benchmarks.run [--steps 40] [--faults 20] [--seeds 3]

Each seed is a proof (`holdfast run --prove`): it fails when the bits differ.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from holdfast.text import table
from holdfast.views.report import summary
from holdfast.views.tail import look


def prove(place: Path, steps: int, faults: int, seed: int) -> None:
    """Run calm and in a storm."""
    flags = ["--prove", "--seed", str(seed), "--faults", str(faults), "--out", str(place)]
    flags += ["--set", f"steps={steps}", "--set", "evaluate.every=0"]
    subprocess.run([sys.executable, "-m", "holdfast", "run", *flags], check=True)


def pace(folder: Path) -> tuple[float, float]:
    """Steps per minute from the first to the last trained step, and the seconds of all of it."""
    at = [
        json.loads(line)["at"]
        for line in (folder / "events" / "orchestrator.jsonl").read_bytes().splitlines()
        if b'"step.trained"' in line
    ]
    return 60.0 * (len(at) - 1) / (at[-1] - at[0]), at[-1] - at[0]


def main() -> None:
    """Print the tables."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=40)
    asked.add_argument("--faults", type=int, default=20)
    asked.add_argument("--seeds", type=int, default=3)
    given = asked.parse_args()
    lost: dict[str, list[float]] = defaultdict(list)
    rows = []
    for seed in range(1, given.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "proof"
            prove(place, given.steps, given.faults, seed)
            calm, storm = pace(place / "calm"), pace(place / "storm")
            picture = look(place / "storm")
            told = summary(picture)
            for fault in picture.faults.kept:
                seconds = picture.faults.lost_s(fault)
                if seconds is not None:
                    lost[fault.kind].append(seconds)
        rows.append(
            [
                str(seed),
                f"{calm[0]:.0f}",
                f"{storm[0]:.0f}",
                f"{storm[0] / calm[0]:.2f}",
                str(told["faults"]),
                f"{told['seconds_lost']:.0f}",
            ]
        )
    heads = ["SEED", "CALM steps/min", "STORM steps/min", "GOODPUT", "FAULTS", "SECONDS LOST"]
    print("\n".join(table(heads, rows, "rrrrrr")), "\n")
    kinds = [
        [kind, str(len(all_)), f"{statistics.median(all_):.1f}", f"{max(all_):.1f}"]
        for kind, all_ in sorted(lost.items())
    ]
    print("\n".join(table(["FAULT", "COUNT", "MEDIAN s", "WORST s"], kinds, "lrrr")))


if __name__ == "__main__":
    main()
