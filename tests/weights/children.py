"""What the child processes of these tests do: `python children.py NAME JSON`.

A child tells its parent what happens, one JSON object per line, and waits for lines on its
standard input (`family.py` is the other end). All weights are made by `model`: every tensor
of a version carries its number, so `whose` finds any mixture of versions and any wrong byte.
No torch here: the children should start quickly.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from holdfast import ledger
from holdfast.errors import Gone, HoldfastError
from holdfast.weights import Pin, Publisher, Retention, Subscriber, Swept, Version, write_part
from holdfast.weights.local import LocalDisk
from kids import be

Array = np.ndarray[Any, Any]

LAYERS = 3
ITEMS = 2048


class Torn(Exception):
    """What was read is not one whole version."""


def model(number: int, flavour: int = 0) -> dict[str, Array]:
    """The weights of a version; `flavour` makes other contents for the same number."""
    base = np.arange(ITEMS, dtype=np.int64) % 251
    mark = 1000 * (10 * number + flavour)
    layers = {f"layers.{n}.weight": base + mark + 300 * n for n in range(LAYERS)}
    return {"frozen.weight": base, **layers}


def whose(tensors: Mapping[str, Array]) -> tuple[int, int]:
    """Number and flavour of these weights. Raises `Torn` unless every byte belongs to them."""
    if tensors.keys() != model(0).keys():
        raise Torn(f"there are only {sorted(tensors)}")
    number, flavour = divmod(int(tensors["layers.0.weight"][0]) // 1000, 10)
    for name, right in model(number, flavour).items():
        if not np.array_equal(tensors[name], right):
            raise Torn(f"{name} does not belong to version {number}, flavour {flavour}")
    return number, flavour


def ranks(number: int, flavour: int) -> list[dict[str, Array]]:
    """The same weights divided among three ranks; the first has what never changes."""
    tensors = model(number, flavour)
    parts: list[list[str]] = [["frozen.weight"], ["layers.0.weight"], []]
    parts[2] = [name for name in tensors if name not in (*parts[0], *parts[1])]
    return [{name: tensors[name] for name in part} for part in parts]


async def publish(
    publisher: Publisher, number: int, flavour: int = 0, way: str = "whole"
) -> Version | Swept:
    """Publish the model in one call (`whole`), or as three ranks do (`ranks`)."""
    files = {"config.json": b'{"model": "none"}'}
    if way == "whole":
        return await publisher.publish(number, model(number, flavour), files=files)
    ticket = await publisher.begin(number)
    for rank, tensors in enumerate(ranks(number, flavour)):
        # A rank whose draft is gone only knows that; what it means, `finish` says.
        with contextlib.suppress(Gone):
            await write_part(LocalDisk(), ticket, rank, tensors)
    return await publisher.finish(ticket, LAYERS, files=files)


def read_pin(pin: Pin, pause_s: float = 0.0) -> tuple[int, int]:
    """Read a pinned version tensor by tensor."""
    found = {}
    for name in pin.names:
        found[name] = pin.numpy(name).copy()
        time.sleep(pause_s)
    return whose(found)


def read_folder(folder: Path, pause_s: float = 0.0) -> tuple[int, int]:
    """Read a folder with the real library, by paths, one tensor after the other."""
    found: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as file:
            names = list(file.keys())
        for name in names:
            time.sleep(pause_s)
            with safetensors.safe_open(path, "numpy") as file:
                found[name] = file.get_tensor(name)
    return whose(found)


def newest_marked(base: Path) -> Path | None:
    """The newest version that has its marker, found as prime-rl does."""
    marked = [path for path in base.glob("step_*") if (path / "STABLE").exists()]
    return max(marked, key=lambda path: int(path.name.removeprefix("step_")), default=None)


# ---- talking to the parent -----------------------------------------------------


def say(what: str, **fields: object) -> None:
    """Tell the parent one thing."""
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


async def told() -> str:
    """The parent's next line; empty when there will be none."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def attempt(act: Awaitable[Any], **fields: object) -> None:
    """Tell how something ended: with which error of ours, if with any."""
    began = time.monotonic()
    error = text = ""
    try:
        await act
    except HoldfastError as failure:
        error, text = type(failure).__name__, str(failure)
    say("outcome", error=error, text=text, seconds=time.monotonic() - began, **fields)


# ---- the children --------------------------------------------------------------


def opened(url: str) -> contextlib.AbstractAsyncContextManager[ledger.Ledger | None]:
    """The channel's ledger. No URL: marker files."""
    return ledger.open(url) if url else contextlib.nullcontext()


async def publisher(
    root: str,
    url: str,
    versions: Sequence[tuple[int, int]] = (),
    way: str = "ranks",
    keep_last: int = 2,
) -> None:
    """Open a publisher and, when told, try to publish versions one after the other."""
    async with opened(url) as led:
        one = Publisher(root, led, "policy", Retention(keep_last=keep_last))
        try:
            await one.open()
        except HoldfastError as error:
            say("ready", error=type(error).__name__, text=str(error))
            return
        say("ready", error="", epoch=one.epoch)
        await told()
        for number, flavour in versions:
            await attempt(publish(one, number, flavour, way), number=number, flavour=flavour)
    say("done")


class Witness:
    """Two readers in one process: a subscriber, and one that knows only marker files."""

    def __init__(self, root: str) -> None:
        self.base = Path(root) / "policy"
        self.pinned: set[tuple[int, int]] = set()
        self.marked: set[tuple[int, int]] = set()
        self.reads = 0
        self.vanished = 0
        self.problems: list[str] = []
        self.over = threading.Event()

    def look(self) -> None:
        """Read the newest marked version again and again, as prime-rl does."""
        while not self.over.wait(0.01):
            folder = newest_marked(self.base)
            if folder is not None:
                self.look_into(folder)

    def look_into(self, folder: Path) -> None:
        """Whatever has its marker, before and after it was read, is one whole version."""
        try:
            before = (folder / "STABLE").stat()
        except FileNotFoundError:
            return
        problem = ""
        try:
            found = read_folder(folder)
        except (OSError, safetensors.SafetensorError, Torn) as error:
            problem = f"{folder.name}: {type(error).__name__}: {error}"
        with contextlib.suppress(FileNotFoundError):
            after = (folder / "STABLE").stat()
            if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
                if problem:
                    self.problems.append(problem)
                elif f"step_{found[0]}" != folder.name:
                    self.problems.append(f"{folder.name} holds version {found}")
                else:
                    self.reads += 1
                    self.marked.add(found)
                return
        self.vanished += 1

    async def follow(self, subscriber: Subscriber) -> None:
        """Pin and read the newest version again and again."""
        while not self.over.is_set():
            await asyncio.sleep(0.01)
            try:
                if await subscriber.latest() is None:
                    continue
                async with subscriber.pin() as pin:
                    found = await asyncio.to_thread(read_pin, pin)
            except (HoldfastError, OSError, Torn) as error:
                self.problems.append(f"pin: {type(error).__name__}: {error}")
                continue
            if found[0] != pin.number:
                self.problems.append(f"version {pin.number} holds version {found}")
            self.reads += 1
            self.pinned.add(found)


async def readers(root: str, url: str) -> None:
    """Read all the time; told a number, go on until both have read it, and report."""
    witness = Witness(root)
    async with (
        opened(url) as led,
        Subscriber(root, led, "policy", "witness", needs="latest", lease_s=5) as subscriber,
    ):
        looking = threading.Thread(target=witness.look)
        looking.start()
        following = asyncio.ensure_future(witness.follow(subscriber))
        say("ready")
        last = int(await told() or -1)
        limit = time.monotonic() + 10
        while last not in {n for n, _ in witness.pinned} & {n for n, _ in witness.marked}:
            if time.monotonic() > limit:
                witness.problems.append(f"version {last} was never read")
                break
            await asyncio.sleep(0.01)
        witness.over.set()
        await following
        looking.join()
    say(
        "report",
        reads=witness.reads,
        vanished=witness.vanished,
        pinned=sorted(witness.pinned),
        marked=sorted(witness.marked),
        problems=witness.problems[:5],
    )


async def consumer(
    root: str, url: str, name: str, needs: Any, lease_s: float, number: int | None = None
) -> None:
    """Pin a version, the newest, and do with it what the parent says, one word per line."""
    async with (
        opened(url) as led,
        Subscriber(root, led, "policy", name, needs=needs, lease_s=lease_s) as subscriber,
    ):
        say("ready")
        await told()
        async with subscriber.pin(number) as pin:
            say("pinned", number=pin.number)
            while word := await told():
                await _obey(word, subscriber, pin)
    say("done")


async def _obey(word: str, subscriber: Subscriber, pin: Pin) -> None:
    async def again() -> None:
        async with subscriber.pin() as other:
            say("read", found=read_pin(other))

    async def stage() -> None:
        folder = Path(await pin.stage())
        say("staged", folder=str(folder), found=read_folder(folder))

    if word == "read":
        say("read", found=read_pin(pin))
    elif word == "check":
        await attempt(pin.check())
    elif word == "stage":
        await attempt(stage())
    elif word == "serve":
        await pin.stage()
        await attempt(subscriber.acknowledge(pin.number))
    elif word == "again":
        await attempt(again())
    else:
        raise ValueError(word)


# ---- the race --------------------------------------------------------------------


async def trainer(
    root: str, url: str, steps: int, step_s: float, retention: dict[str, Any]
) -> None:
    """Train: publish version after version, at most one per `step_s`."""
    async with (
        opened(url) as led,
        Publisher(root, led, "policy", Retention(**retention)) as one,
    ):
        say("ready")
        await told()
        for number in range(1, steps + 1):
            began = time.monotonic()
            await one.publish(number, model(number))
            say("published", number=number, seconds=time.monotonic() - began)
            await asyncio.sleep(max(0.0, step_s - (time.monotonic() - began)))
    say("done")


async def loader(
    root: str,
    url: str,
    name: str,
    needs: Any,
    lease_s: float,
    load_s: float,
    way: str,
    last: int,
) -> None:
    """Load version after version, each in `load_s`, until the last one is loaded."""
    loaded: list[int] = []
    lost = 0
    async with (
        opened(url) as led,
        Subscriber(root, led, "policy", name, needs=needs, lease_s=lease_s) as subscriber,
    ):
        say("ready")
        await told()
        while not loaded or loaded[-1] < last:
            try:
                number = await _next(subscriber, loaded, needs)
                async with subscriber.pin(number) as pin:
                    say("loading", number=pin.number)
                    found = await _load(pin, load_s, way, root)
                    if found != (pin.number, 0):
                        raise Torn(f"version {pin.number} holds version {found}")
                    await subscriber.acknowledge(pin.number)
            except Gone as error:
                # Only whoever was stopped for longer than its lease may hear this.
                lost += 1
                say("lost", error=type(error).__name__, text=str(error))
                continue
            loaded.append(pin.number)
    say("report", name=name, loaded=loaded, lost=lost)


async def _next(subscriber: Subscriber, loaded: list[int], needs: str) -> int:
    than = loaded[-1] if loaded else None
    if needs == "every" and than is not None:
        with contextlib.suppress(Gone):
            return (await subscriber.wait_for(than + 1, timeout_s=30)).version
    return (await subscriber.wait_newer(than, timeout_s=30)).version


async def _load(pin: Pin, load_s: float, way: str, root: str) -> tuple[int, int]:
    """Read through the pin, from the staging folder, or from the version's own folder."""
    pause_s = load_s / len(pin.names)
    if way == "pin":
        return await asyncio.to_thread(read_pin, pin, pause_s)
    own = Path(root) / "policy" / f"step_{pin.number}"
    folder = Path(await pin.stage()) if way == "stage" else own
    try:
        return await asyncio.to_thread(read_folder, folder, pause_s)
    except (FileNotFoundError, Torn):
        await pin.check()  # raises if we had no right to these paths any more
        raise


def naive_trainer(root: str, steps: int, step_s: float) -> None:
    """What prime-rl does: write, mark, and delete what is two steps old, by arithmetic."""
    say("ready")
    sys.stdin.readline()
    for number in range(1, steps + 1):
        folder = Path(root) / "policy" / f"step_{number}"
        folder.mkdir(parents=True)
        for name, tensor in model(number).items():
            safetensors.numpy.save_file({name: tensor}, folder / f"{name}.safetensors")
        (folder / "STABLE").touch()
        shutil.rmtree(folder.with_name(f"step_{number - 2}"), ignore_errors=True)
        say("published", number=number)
        time.sleep(step_s)
    say("done")


def watch(
    base: Path, marker: Path, load_s: float, last: int, stall_s: float = 0.0
) -> dict[str, Any]:
    """What prime-rl's watcher does: see STABLE, load by path, write the marker, next.

    Before it looks for the first time it writes the marker too. It stalls once, after it has
    seen a version and before it loads it.
    """
    write_marker(marker, 0)
    loaded: list[int] = []
    try:
        while not loaded or loaded[-1] < last:
            folder = newest_marked(base)
            step = int(folder.name.removeprefix("step_")) if folder is not None else -1
            if folder is None or (loaded and step <= loaded[-1]):
                time.sleep(0.002)
                continue
            if len(loaded) == 2:
                time.sleep(stall_s)
            found = read_folder(folder, load_s / (LAYERS + 1))
            if found != (step, 0):
                raise Torn(f"{folder} holds version {found}")
            loaded.append(step)
            write_marker(marker, step)
    except (OSError, safetensors.SafetensorError, Torn) as error:
        return {"loaded": loaded, "error": f"{type(error).__name__}: {error}"}
    return {"loaded": loaded, "error": ""}


def write_marker(marker: Path, step: int) -> None:
    """Write LOADED_STEP aside and rename it."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    aside = marker.with_name(f".{marker.name}")
    aside.write_text(f"{step}\n")
    aside.replace(marker)


def watcher(base: str, marker: str, load_s: float, last: int, stall_s: float) -> None:
    """A process that knows nothing of Holdfast but the marker."""
    say("ready")
    sys.stdin.readline()
    say("report", **watch(Path(base), Path(marker), load_s, last, stall_s))


if __name__ == "__main__":
    be(publisher, readers, consumer, trainer, loader, watcher, naive_trainer)
