"""The storm: three writers, two readers, kill -9 at random, and a check of every promise.

Writers write to a file what they are about to do and what they have done; readers, and the
test itself, hold the store against that.
"""

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.transfer import Store
from kids import Kid
from patience import HANG_S

from .children import Book
from .conftest import Opener
from .family import start

BUDGET = 48 << 20
SHARE = 10 << 20
"""Of one writer, which keeps about half of it alive."""
LEAST_CHECKS = 100


class Storm:
    """The processes of one storm, each replaced when it is killed."""

    def __init__(self, name: str, folder: Path, luck: random.Random) -> None:
        self.url = f"shm://{name}"
        self.folder = folder
        self.luck = luck
        self.logs = [str(folder / f"writer-{n}.log") for n in range(3)]
        self.problems: list[str] = []
        self.checks = 0
        self.kids: dict[int, Kid] = {}
        self.at_work: set[int] = set()
        """Those that have done something since they were started."""
        self.written: dict[int, int] = {}
        self.stacks: dict[int, contextlib.ExitStack] = {}

    def start(self, role: int) -> None:
        """Roles 0 to 2 write, 3 and 4 read."""
        stack = self.stacks[role] = contextlib.ExitStack()
        self.at_work.discard(role)
        args: dict[str, Any] = {"url": self.url, "seed": self.luck.getrandbits(20)}
        if role < 3:
            self.written[role] = self._size(role)
            what, args = "storm_writer", {**args, "log": self.logs[role], "budget": SHARE}
        else:
            what, args = "storm_reader", {**args, "logs": self.logs, "by_view": role == 4}
        self.kids[role] = stack.enter_context(start(what, folder=self.folder, **args))

    def _size(self, role: int) -> int:
        log = Path(self.logs[role])
        return log.stat().st_size if log.exists() else 0

    def listen(self) -> None:
        """Take in what readers have found, and who is at work."""
        self.at_work |= {role for role in range(3) if self._size(role) > self.written[role]}
        for role, kid in self.kids.items():
            for line in kid.lines(0):
                if line["what"] == "checked":
                    self.at_work.add(role)
                    self.problems += line["problems"]
                    self.checks += line["checks"]
                    if line["taken"] > BUDGET:
                        self.problems.append(f"{line['taken']} bytes are taken")
                else:
                    self.problems.append(f"{role}: {line}")
            if not kid.child.alive():
                self.problems.append(f"{role} ended by itself, with {kid.child.wait(1)}")

    def kill(self, role: int) -> None:
        """kill -9, and a successor."""
        self.kids[role].kill()
        self.stacks[role].close()
        self.start(role)

    def close(self) -> None:
        """End it."""
        for stack in self.stacks.values():
            stack.close()


def _storm(name: str, opener: Opener, folder: Path, seed: int, seconds: float) -> None:
    luck = random.Random(seed)
    store: Store = opener(f"?budget={BUDGET}&segment=1M")
    storm = Storm(name, folder, luck)
    book = Book(storm.logs)
    kills = 0
    try:
        for role in range(5):
            storm.start(role)
        began = time.monotonic()
        while not storm.problems and (
            time.monotonic() < began + seconds or storm.checks <= LEAST_CHECKS
        ):
            assert time.monotonic() < began + seconds + HANG_S, f"only {storm.checks} checks"
            time.sleep(luck.uniform(0.01, 0.4))
            storm.listen()
            problems, checks = book.check(store, luck, by_view=luck.random() < 0.3)
            storm.problems += problems
            storm.checks += checks
            role = luck.choice((0, 1, 2, 0, 1, 2, 3, 4))
            if role in storm.at_work:  # on a busy machine the others have not even begun
                storm.kill(role)
                kills += 1
    finally:
        storm.close()
    assert storm.problems == []
    book.read()
    for one in (store, opener()):
        problems, checks = book.check(one, luck, by_view=False)
        assert problems == []
        found = {stored.key: stored.generation for stored in one.scan()}
        for key, ref in book.there.items():
            assert found[key] == ref.generation
        assert one.stat().taken <= BUDGET
    print(f"{kills} kills, {storm.checks} checks, {len(book.failures)} refusals")
    assert len(book.failures) < 5, book.failures[:3]
    store.delete([stored.key for stored in store.scan()])
    refs = store.put({f"full-{n}": bytes(500_000) for n in range(80)})
    assert len(refs) == 80


def test_storm(name: str, opener: Opener, tmp_path: Path, seed: int) -> None:
    """Nothing acknowledged is lost, nothing deleted comes back, and space is bounded."""
    _storm(name, opener, tmp_path, seed, 8.0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(4))
def test_long_storm(name: str, opener: Opener, tmp_path: Path, seed: int, turn: int) -> None:
    """The same for a minute, with four seeds."""
    _storm(name, opener, tmp_path, seed + turn, 60.0)
