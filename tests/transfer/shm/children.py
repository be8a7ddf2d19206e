"""What the child processes of these tests do: `python children.py NAME JSON`.

A child tells what it is about to do and what it has done, one JSON object per line. What a
key holds is a function of key, generation and size, so that anybody can check it.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from holdfast.errors import BatchFailed, HoldfastError
from holdfast.retry import Policy
from holdfast.transfer import Ref, Store, connect
from holdfast.transfer.store import status

QUICK = Policy(attempts=3, base_s=0.01, factor=2.0, max_s=0.05, deadline_s=10.0)


def content(key: str, generation: int, size: int) -> bytes:
    """What is stored under a key."""
    seed = xxh3_64_intdigest(f"{key}/{generation}/{size}".encode())
    return np.random.default_rng(seed).bytes(size)


def say(what: str, **more: Any) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps({"what": what, **more}) + "\n")
    sys.stdout.flush()


def told() -> str:
    """Wait for a line from the parent."""
    return sys.stdin.readline().strip()


# -- one child that does a little of everything -----------------------------------------


class Busy:
    """Puts, replaces and deletes at random, and keeps about half of the budget alive.

    It notes what it is about to do, and what it has done.
    """

    def __init__(
        self,
        store: Store,
        seed: int,
        budget: int,
        note: Callable[..., None] = say,
        prefix: str = "",
    ) -> None:
        self.store = store
        self.luck = random.Random(seed)
        self.budget = budget
        self.note = note
        self.prefix = prefix
        self.values: dict[str, tuple[int, int]] = {}
        self.number = 0

    def step(self) -> None:
        """Do one thing."""
        alive = sum(size for _, size in self.values.values())
        way = self.luck.random()
        if alive > self.budget * 0.45 or (way < 0.35 and self.values):
            some = self.luck.sample(sorted(self.values), self.luck.randint(1, len(self.values)))
            self.delete(some if way < 0.2 else some[: 1 + len(some) // 2])
        elif way < 0.45:
            self.number += 1
            size = self.luck.randint(self.budget // 6, self.budget // 4)
            self.put({f"{self.prefix}large-{self.number}": size})
        elif way < 0.6 and self.values:
            some = self.luck.sample(sorted(self.values), min(3, len(self.values)))
            self.put({key: self.luck.randint(0, self.budget // 64) for key in some})
        else:
            count = self.luck.choice((1, 3, 10))
            self.number += count
            first = self.number
            self.put(
                {
                    f"{self.prefix}k-{first + n}": self.luck.randint(0, self.budget // 32 // count)
                    for n in range(count)
                }
            )

    def squeeze(self) -> None:
        """Leave a little in every segment, and then ask for room: it must be compacted."""
        for turn in range(3):
            full, number = False, 0
            while not full:
                keys = [f"squeeze-{turn}-{number}-{n}" for n in range(2)]
                full = not self.put(dict.fromkeys(keys, self.budget // 80))
                number += 1
            keys = sorted(self.values)
            self.luck.shuffle(keys)
            self.delete(keys[len(keys) // 4 :])

    def put(self, sizes: dict[str, int]) -> bool:
        """Put new contents under these keys."""
        generation = self.store.generation()
        self.note("putting", keys=sizes, generation=generation)
        values = {key: content(key, generation, size) for key, size in sizes.items()}
        try:
            done = self.store.put(values, generation=generation)
        except BatchFailed as error:
            if any(status(one) != "failed" for one in error.failures.values()):
                raise
            self.note("failed", why=str(error)[:300])
            done = error.values
        put = {key: sizes[key] for key in done}
        self.values |= {key: (generation, size) for key, size in put.items()}
        sums = [ref.checksum for ref in done.values()]
        self.note("put", keys=put, generation=generation, sums=sums)
        return len(done) == len(sizes)

    def delete(self, keys: list[str]) -> None:
        """Delete these keys."""
        self.note("deleting", keys=keys)
        known = [key for key in keys if self.values.pop(key, None)]
        gone = self.store.delete(keys)
        assert all(gone[key] for key in known)
        self.note("deleted", keys=keys)


def busy(url: str, seed: int, budget: int, steps: int, squeeze: bool) -> None:
    """Do a little of everything."""
    with connect(url, QUICK) as store:
        one = Busy(store, seed, budget)
        if squeeze:
            one.squeeze()
        for _ in range(steps):
            one.step()
    say("done")


# -- children that do one thing and are stopped over it ---------------------------------


def keeper(url: str, sizes: dict[str, int], generation: int) -> None:
    """Put some values, then wait; told keys, delete them."""
    with connect(url, QUICK) as store:
        store.put({k: content(k, generation, n) for k, n in sizes.items()}, generation=generation)
        say("ready")
        while word := told():
            say("deleted", answer=store.delete(word.split(",")))


def visitor(url: str, rounds: int) -> None:
    """Come, put a lot, delete it, leave; again and again."""
    for n in range(rounds):
        with connect(url, QUICK) as store:
            keys = [f"visit-{os.getpid()}-{n}-{at}" for at in range(16)]
            store.put({key: content(key, 1, 250_000) for key in keys})
            say("round")
            store.delete(keys)


def viewer(url: str, keys: list[str], generation: int, size: int, rounds: int) -> None:
    """Read again and again inside one view."""
    with connect(url, QUICK) as store, store.view(keys) as values:
        say("ready")
        for _ in range(rounds):
            told()
            right = all(values[key].tobytes() == content(key, generation, size) for key in keys)
            say("read", right=right)


def getter(url: str, key: str) -> None:
    """Get one key again and again, and tell what came."""
    with connect(url, QUICK) as store:
        say("ready")
        while told():
            try:
                value = store.get([key])[key]
            except BatchFailed as error:
                say("got", status=status(error.failures[key]))
            else:
                generation = int.from_bytes(value[:8], "little")
                right = value[8:] == content(key, generation, len(value) - 8)
                say("got", status="ok", generation=generation, right=right)


def racer(url: str, keys: list[str], rounds: int, seed: int) -> None:
    """Put the same keys again and again, as another process does."""
    luck = random.Random(seed)
    with connect(url, QUICK) as store:
        say("ready")
        told()
        refs: dict[str, Ref] = {}
        for _ in range(rounds):
            refs |= store.put({key: luck.randbytes(100) for key in keys})
    say("done", refs={key: ref.generation for key, ref in refs.items()})


# -- the storm --------------------------------------------------------------------------


def storm_writer(url: str, log: str, seed: int, budget: int) -> None:
    """Put and delete, and write to a file before and after, for readers to check."""
    book = Book([log])
    book.read()
    # Unbuffered, and each line in one write: what was written survives a kill.
    with Path(log).open("ab", buffering=0) as file, connect(url, QUICK) as store:

        def note(what: str, **more: object) -> None:
            file.write(json.dumps({"what": what, **more}).encode() + b"\n")

        one = Busy(store, seed, budget, note, f"{Path(log).stem}-{seed}-")
        one.values = {key: (ref.generation, book.sizes[key]) for key, ref in book.there.items()}
        if book.begun:
            one.delete(sorted(book.begun))
        while True:
            one.step()


def storm_reader(url: str, logs: list[str], seed: int, by_view: bool) -> None:
    """Check what the writers' files say, for as long as it lives."""
    luck = random.Random(seed)
    with connect(url, QUICK) as store:
        book = Book(logs)
        while True:
            problems, checks = book.check(store, luck, by_view)
            say("checked", problems=problems, checks=checks, taken=store.stat().taken)


class Book:
    """What the writers have written down."""

    def __init__(self, logs: list[str]) -> None:
        self.paths = [Path(log) for log in logs]
        self.positions = dict.fromkeys(self.paths, 0)
        self.there: dict[str, Ref] = {}
        self.sizes: dict[str, int] = {}
        self.gone: dict[str, Ref] = {}
        self.doubtful: dict[str, Ref] = {}
        self.begun: set[str] = set()
        """What somebody was about to put or delete, and has not done."""
        self.failures: list[str] = []

    def read(self) -> None:
        """Read what is new."""
        for path in self.paths:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self.positions[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.positions[path] += len(whole)
            for line in whole.splitlines():
                self._note(json.loads(line))

    def _note(self, one: dict[str, Any]) -> None:
        if one["what"] == "failed":
            self.failures.append(one["why"])
            return
        begins = one["what"] in ("putting", "deleting")
        (self.begun.update if begins else self.begun.difference_update)(one["keys"])
        for at, key in enumerate(one["keys"]):
            if begins:
                # Whether the old value is there is not known until the word that it is done.
                old = self.there.pop(key, None)
                if old is not None:
                    self.doubtful[key] = old
                continue
            if key in self.doubtful:
                self.gone[key] = self.doubtful.pop(key)
            if one["what"] == "put":
                size = one["keys"][key]
                nbytes = size + 64 * ((56 + len(key) + 63) // 64)
                self.there[key] = Ref(key, one["generation"], one["sums"][at], nbytes)
                self.sizes[key] = size

    def check(self, store: Store, luck: random.Random, by_view: bool) -> tuple[list[str], int]:
        """Get some values that should be there, and some that should not."""
        self.read()
        problems = []
        some = luck.sample(sorted(self.there), min(20, len(self.there)))
        refs = [self.there[key] for key in some]
        values: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        try:
            if by_view:
                with store.view(refs) as found:
                    values = dict(found)
            else:
                values = store.get(refs)
        except BatchFailed as error:
            values, failures = error.values, error.failures
        self.read()
        for ref in refs:
            # Whoever deletes or replaces says so before it begins.
            if ref.key in failures and self.there.get(ref.key) == ref:
                problems.append(f"{ref}: {failures[ref.key]!r}")
            right = content(ref.key, ref.generation, self.sizes[ref.key])
            if ref.key in values and values[ref.key] != right and self.there.get(ref.key) == ref:
                problems.append(f"{ref}: wrong bytes")
        lost = [
            ref for key, ref in luck.sample(sorted(self.gone.items()), min(20, len(self.gone)))
        ]
        found_again = store.get(lost, partial=True).values
        problems += [f"{key} was deleted or replaced, and is there" for key in found_again]
        return problems, len(refs)


CHILDREN: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (busy, keeper, visitor, viewer, getter, racer, storm_writer, storm_reader)
}

if __name__ == "__main__":
    try:
        CHILDREN[sys.argv[1]](**json.loads(sys.argv[2]))
    except HoldfastError as problem:
        say("error", error=type(problem).__name__, text=str(problem))
        raise
    except BrokenPipeError:
        time.sleep(0)
