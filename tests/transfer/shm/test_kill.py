"""kill -9 at every fault point: what was put stays, what was deleted does not come back."""

import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.transfer import Store
from kids import points

from .children import content
from .conftest import Opener
from .family import start

BUDGET = 2 << 20
OPTIONS = f"?budget={BUDGET}&segment=128K"


class Told:
    """What a child has told: what must be there, and what it was about to do when it died."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.there: dict[str, tuple[int, int]] = {}
        self.gone: set[str] = set()
        begun: dict[str, Any] = {}
        for line in lines:
            if line["what"] in ("putting", "deleting"):
                begun = line
            elif line["what"] == "put":
                for key, size in line["keys"].items():
                    self.there[key] = (line["generation"], size)
                    self.gone.discard(key)
                begun = {}
            elif line["what"] == "deleted":
                for key in line["keys"]:
                    del self.there[key]
                    self.gone.add(key)
                begun = {}
        puts = "generation" in begun
        self.generation: int = begun.get("generation", 0)
        self.putting: dict[str, int] = begun["keys"] if puts else {}
        self.deleting: list[str] = [] if puts else begun.get("keys", [])

    def check(self, store: Store) -> dict[str, int]:
        """Check a store; returns the generation of each key that is there."""
        keys = {*self.there, *self.gone, *self.putting, *self.deleting}
        found = store.get(dict.fromkeys(keys), partial=True)
        scanned = {one.key: one.generation for one in store.scan()}
        for key, (generation, size) in self.there.items():
            right = [content(key, generation, size)]
            if key in self.putting:
                right.append(content(key, self.generation, self.putting[key]))
            if key not in self.deleting or key in found.values:
                assert found.values.get(key) in right, f"{key}: {found.failures.get(key)!r}"
        for key in self.gone - self.putting.keys():
            assert key not in found.values
            assert key not in scanned
        for key in self.putting.keys() - self.there.keys():
            if key in found.values:
                assert found.values[key] == content(key, self.generation, self.putting[key])
        assert scanned.keys() & keys == found.values.keys()
        assert store.stat().taken <= BUDGET
        return scanned


def _kill_at(point: str, hit: int, seed: int, name: str, opener: Opener, folder: Path) -> None:
    witness = opener(OPTIONS)
    url = f"shm://{name}"
    first: list[dict[str, Any]] = []
    args: dict[str, Any] = {"folder": folder, "url": url}
    with start("busy", seed=1, budget=BUDGET // 2, steps=20, squeeze=False, **args) as earlier:
        first += earlier.all()
    assert first[-1]["what"] == "done"
    before = Told(first)
    before.check(witness)
    with start(
        "busy",
        fault=f"{point}:kill@{hit}",
        seed=seed % 1000 + 2,
        budget=BUDGET,
        steps=600,
        squeeze=point.startswith("shm.compact"),
        **args,
    ) as victim:
        lines = victim.all()
        assert victim.fired() == point, f"{point} was not passed {hit} times: {lines[-3:]}"
    told = Told(first + lines)
    # Who was there all the time and who comes new see the same.
    assert told.check(witness) == told.check(opener())
    _goes_on(told, witness, opener(), seed)


def _goes_on(told: Told, witness: Store, heir: Store, seed: int) -> None:
    """The next writer adopts what is left; its wraps damage nothing; all space can be used."""
    heir.delete([*told.deleting, *told.putting])
    for key in [*told.deleting, *told.putting]:
        told.there.pop(key, None)
        told.gone.add(key)
    told.putting, told.deleting = {}, []
    told.check(witness)
    luck = random.Random(seed)
    surplus = luck.sample(sorted(told.there), len(told.there))
    while sum(told.there[key][1] for key in surplus) > BUDGET // 3:
        one = surplus.pop()
        heir.delete([one])
        del told.there[one]
        told.gone.add(one)
    for n in range(40):
        heir.put({"wrap": luck.randbytes(BUDGET // 8), f"more-{n % 3}": b"x" * (n * 100)})
    told.check(witness)
    told.check(heir)
    everything = [one.key for one in witness.scan()]
    assert all(witness.delete(everything).values())
    assert heir.stat().keys == 0
    size = BUDGET // 32
    refs = heir.put({f"full-{n}": content("full", n, size) for n in range(26)})
    values = witness.get(refs.values())
    assert all(values[f"full-{n}"] == content("full", n, size) for n in range(26))
    assert witness.stat().taken <= BUDGET


@pytest.mark.parametrize("point", points("shm."))
def test_killed_at(point: str, name: str, opener: Opener, tmp_path: Path, seed: int) -> None:
    """Whatever was acknowledged is there for old and new readers, and all space is reclaimed."""
    often = point.startswith(("shm.put", "shm.delete", "shm.reuse", "shm.compact"))
    _kill_at(point, 1 + seed % 3 * often, seed, name, opener, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("point", "hit"),
    [
        (point, hit)
        for point in points("shm.")
        if not point.startswith("shm.adopt")
        # A victim grows a few times until its budget is used, and then works within it.
        for hit in range(1, 5 if point.startswith("shm.grow") else 9)
    ],
)
def test_killed_later(
    point: str, hit: int, name: str, opener: Opener, tmp_path: Path, seed: int
) -> None:
    """The same at later passes of the same point."""
    _kill_at(point, hit, seed, name, opener, tmp_path)
