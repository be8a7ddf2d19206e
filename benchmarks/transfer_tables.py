"""What `transfer.py` has found, as tables."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.transfer_work import SMALL, WORKLOADS

Times = list[float]


class Result:
    """Seconds of every counted turn, put and get, by workload."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self.trouble = ""
        """Why there is no figure, or no further one."""
        self.cold: set[str] = set()
        """Workloads with one turn only, that found nothing warm: there was no time for more."""
        self.puts: dict[str, Times] = {}
        self.gets: dict[str, Times] = {}
        self.digests: dict[str, Times] = {}
        """Seconds of nothing but the checksums of the same bytes."""

    def add(self, workload: str, put_s: float, get_s: float) -> None:
        """A turn."""
        self.puts.setdefault(workload, []).append(put_s)
        self.gets.setdefault(workload, []).append(get_s)

    def count(self, workload: str) -> int:
        """How many keys were really moved."""
        return min(self.most, WORKLOADS[workload].count)

    def per_key(self, workload: str, get: bool) -> Times:
        """Seconds per key, turn by turn."""
        times = (self.gets if get else self.puts).get(workload, [])
        return [one / self.count(workload) for one in times]


class Figures:
    """GB/s of every contender, keys/s for small values; printed as they come."""

    def __init__(self) -> None:
        heading = " | ".join(f"{w.count:,} × {name}: put | get" for name, w in WORKLOADS.items())
        print(f"\n| | {heading} | turns |\n|{' --- |' * (2 + 2 * len(WORKLOADS))}", flush=True)
        self._notes: list[str] = []

    def add(self, results: Sequence[Result]) -> None:
        """Rows of the table."""
        for result in results:
            cells = [_figure(result, name, get) for name in WORKLOADS for get in (False, True)]
            turns = {len(times) for times in result.puts.values()} or {0}
            counts = f"{min(turns)}" if len(turns) == 1 else f"{min(turns)} to {max(turns)}"
            mark = ""
            if result.most < WORKLOADS[SMALL].count:
                mark += _note(self._notes, f"the last workload was {result.most:,} keys only")
            if result.cold:
                names = ", ".join(name for name in WORKLOADS if name in result.cold)
                mark += _note(self._notes, f"one cold turn only, for lack of time: {names}")
            if result.trouble and not result.puts:
                cells = [result.trouble, *cells[1:]]
            elif result.trouble:
                mark += _note(self._notes, result.trouble)
            print(f"| {result.name}{mark} | {' | '.join(cells)} | {counts} |", flush=True)
            if result.name == "Ray object store":
                self._notes.append(ABOUT_PEERS)

    def end(self) -> None:
        """Print what is to be said about some of them."""
        print("\n" + "\n".join(self._notes) if self._notes else "")


ABOUT_PEERS = """\
Ray maps what it gets and does not copy it: compare with shm, view. TransferQueue takes and gives
all rows as one tensor, its metadata fetched before the clock: compare with shm, rows, too. Neither
verifies."""


def _note(notes: list[str], text: str) -> str:
    for number, note in enumerate(notes, 1):
        if note.endswith(f" {text}"):
            return f" ({number})"
    notes.append(f"({len(notes) + 1}) {text}")
    return f" ({len(notes)})"


def _figure(result: Result, workload: str, get: bool) -> str:
    times = result.per_key(workload, get)
    if not times:
        return "–"
    middle = statistics.median(times)
    if workload == SMALL:
        return f"{1e-3 / middle:,.0f} k/s"
    return f"{WORKLOADS[workload].size / middle / 1e9:.2f} GB/s"


class Ratio(NamedTuple):
    """Two contenders side by side."""

    words: str
    ours: str
    theirs: str
    aim: str
    only: tuple[str, ...] = tuple(WORKLOADS)
    puts: bool = True
    gets: bool = True


RATIOS = (
    Ratio("shm against TransferQueue SimpleStorage", "shm", "TransferQueue SimpleStorage", "≥ 5"),
    Ratio("shm, rows against the same", "shm, rows", "TransferQueue SimpleStorage", "", puts=True),
    Ratio("shm, put against memcpy", "shm", "memcpy", "≥ 0.5", ("16 MiB",), gets=False),
    Ratio(
        "shm, get against memcpy into new memory",
        "shm",
        "memcpy into new memory",
        "≥ 0.5",
        ("16 MiB",),
        puts=False,
    ),
    Ratio(
        "shm, get_into against memcpy", "shm, get_into", "memcpy", "≥ 0.5", ("16 MiB",), puts=False
    ),
    Ratio("redis against redis-py", "redis", "redis-py, bare", "≥ 0.9"),
    Ratio("redis, rows against redis-py", "redis, rows", "redis-py, bare, rows", ""),
    Ratio("mooncake against its bare client", "mooncake", "Mooncake client, bare", "≥ 0.9"),
)


def ratios(results: Mapping[str, Result]) -> None:
    """How much quicker ours is than theirs; and what verification costs."""
    heading = " | ".join(f"{name}: put | get" for name in WORKLOADS)
    print(f"\n| times as quick (single turns) | {heading} | aim |")
    print(f"|{' --- |' * (2 + 2 * len(WORKLOADS))}")
    for ratio in RATIOS:
        ours, theirs = results.get(ratio.ours), results.get(ratio.theirs)
        if ours is None or theirs is None:
            continue
        cells = []
        for workload in WORKLOADS:
            for get, wanted in ((False, ratio.puts), (True, ratio.gets)):
                shown = wanted and workload in ratio.only
                pair = theirs.per_key(workload, get), ours.per_key(workload, get)
                cells.append(_ratio(*pair) if shown else "")
        print(f"| {ratio.words} | {' | '.join(cells)} | {ratio.aim} |")
    _verification(results)


def _ratio(above: Times, below: Times) -> str:
    """That of the medians, and from where to where it went turn by turn."""
    if not above or not below:
        return "–"
    single = [one / two for one, two in zip(above, below, strict=False)]
    middle = statistics.median(above) / statistics.median(below)
    return f"{middle:.2f} ({min(single):.2f} to {max(single):.2f})"


def _verification(results: Mapping[str, Result]) -> None:
    shm, without = results.get("shm"), results.get("shm without checksum")
    if shm is None or without is None:
        return
    heading = " | ".join(f"{name}: put | get" for name in WORKLOADS)
    print(f"\n| part of shm's time that is verification | {heading} | aim |")
    print(f"|{' --- |' * (2 + 2 * len(WORKLOADS))}")

    def left_out(workload: str, get: bool) -> float:
        bare, whole = without.per_key(workload, get), shm.per_key(workload, get)
        return 1 - statistics.median(bare) / statistics.median(whole)

    def alone(workload: str, get: bool) -> float:
        times = (shm.gets if get else shm.puts)[workload]
        return statistics.median(shm.digests[workload]) / statistics.median(times)

    rows: dict[str, Callable[[str, bool], float]] = {
        "saved when it is left out": left_out,
        "the checksums of the same bytes alone": alone,
    }
    for words, share in rows.items():
        cells = []
        for workload in WORKLOADS:
            known = workload in shm.digests and workload in without.puts
            cells += [
                f"{100 * share(workload, get):.1f} %" if known else "–" for get in (False, True)
            ]
        print(f"| {words} | {' | '.join(cells)} | ≤ 10 % |")
