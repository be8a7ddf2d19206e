"""The parent's end of `children.py`: start a child, talk to it, stop it, look at what is left."""

import contextlib
import functools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kids
from holdfast import ledger
from holdfast.errors import HoldfastError
from holdfast.ledger import Ledger
from holdfast.weights import Publisher, Retention, Subscriber
from holdfast.weights.book import Book
from holdfast.weights.channel import Channel
from holdfast.weights.layout import Layout
from kids import Kid
from weights.children import read_pin

HERE = Path(__file__).parent
start = functools.partial(kids.start, HERE / "children.py")


async def go(*kids: Kid) -> None:
    """Let children begin, when all of them are ready."""
    for kid in kids:
        await kid.ahear("ready")
    for kid in kids:
        kid.tell("go")


class House:
    """One channel with its ledger, or without one, as the test itself looks at it."""

    def __init__(self, folder: Path, led: Ledger | None, url: str) -> None:
        self.folder = folder
        self.root = str(folder / "weights")
        self.url = url
        self.ledger = led
        self.layout = Layout(self.root, "policy")
        self.base = Path(self.layout.base)
        self.hidden = Path(self.layout.hidden)

    def start(self, what: str, /, **args: Any) -> contextlib.AbstractContextManager[Kid]:
        """A child of this channel; see `start`."""
        return start(what, root=self.root, url=self.url, folder=self.folder, **args)

    def publisher(self, name: str = "parent", **retention: Any) -> Publisher:
        """A publisher of this process."""
        return Publisher(self.root, self.ledger, "policy", Retention(**retention), name=name)

    def subscriber(self, name: str = "r0", **options: Any) -> Subscriber:
        """A subscriber of this process, which wants the newest version if nothing else is said."""
        return Subscriber(self.root, self.ledger, "policy", name, **{"needs": "latest", **options})

    def channel(self, **how: Any) -> Channel:
        """What publishers and subscribers are made of."""
        return Channel(self.root, self.ledger, "policy", **how)

    def book(self, **how: Any) -> Book:
        """What is recorded of it."""
        return self.channel().book("other", **how)

    async def committed(self) -> list[int]:
        """The versions that the book knows."""
        return sorted((await self.book().view()).versions)

    async def consumers(self) -> list[str]:
        """The consumers that hold a lease."""
        view = await self.book().view()
        return [one.record.name for one in view.members if one.until_s > view.now_s]

    def folders(self) -> list[int]:
        """The versions that have a folder."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.base.glob("step_*"))

    def leftovers(self) -> list[str]:
        """Everything in the temporary folders."""
        places = (self.layout.drafts, self.layout.trash, self.layout.staging)
        found = [path for place in places for path in Path(place).glob("*")]
        return sorted(str(path.relative_to(self.base)) for path in found)

    def bytes_of(self, number: int) -> dict[str, bytes]:
        """All files of a version's folder."""
        folder = self.base / f"step_{number}"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    async def read(self, number: int | None = None) -> tuple[int, int]:
        """Pin a version, verified, and read all of it."""
        async with (
            self.subscriber("reader", needs="latest") as subscriber,
            subscriber.pin(number) as pin,
        ):
            return read_pin(pin)

    async def read_all(self) -> list[tuple[int, int]]:
        """Read every version that the ledger knows."""
        return [await self.read(number) for number in await self.committed()]


@contextlib.asynccontextmanager
async def house(folder: Path, kept_with: str = "sqlite") -> AsyncIterator[House]:
    """A new channel: with a ledger beside it, with one at a URL, or with marker files."""
    if kept_with == "markers":
        yield House(folder, None, "")
        return
    url = f"sqlite:///{folder}/ledger.db" if kept_with == "sqlite" else kept_with
    async with ledger.open(url) as led:
        yield House(folder, led, url)


def weights(number: float, items: int = 8) -> dict[str, Any]:
    """A version that is told by its only number."""
    return {"w": np.full(items, number)}


async def read(root: str | Path, ledger: Ledger | None, version: int) -> int:
    """What a consumer finds under a number."""
    async with Subscriber(root, ledger, consumer="reader") as reader, reader.pin(version) as pin:
        return int(pin.numpy("w")[0])


async def fill(publisher: Publisher, *numbers: int) -> None:
    """Publish these versions."""
    for number in numbers:
        await publisher.publish(number, weights(number))


async def refused(
    entering: contextlib.AbstractAsyncContextManager[object],
    error: type[HoldfastError],
    match: str | None = None,
) -> None:
    """What cannot be entered says why."""
    with pytest.raises(error, match=match):
        async with entering:
            raise AssertionError("something was given out")


def flip(path: Path, at: int) -> None:
    """Change one bit in place, in whatever shares the file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


DAMAGES = (
    "a flipped bit",
    "a truncated shard",
    "an emptied shard",
    "another tensor",
    "swapped shards",
    "no shard",
    "a folder for a shard",
    "a link for a shard",
    "a pipe for a shard",
)


def damage(folder: Path, shard: str, what: str) -> None:
    """Do one of these to a shard of a version; each is a file that was not published."""
    path = folder / shard
    match what:
        case "a flipped bit":
            flip(path, path.stat().st_size - 100)
        case "a truncated shard":
            os.truncate(path, path.stat().st_size - 8)
        case "an emptied shard":
            path.write_bytes(b"")
        case "another tensor":
            [tensor] = safetensors.numpy.load_file(path).values()
            safetensors.numpy.save_file({"other": tensor}, path, {"format": "pt"})
        case "swapped shards":
            other = max(one for one in folder.glob("*.safetensors") if one != path)
            path.rename(folder / "aside")
            other.rename(path)
            (folder / "aside").rename(other)
        case _:
            path.rename(folder.parent / "elsewhere")
            if what == "a folder for a shard":
                path.mkdir()
            elif what == "a link for a shard":
                path.symlink_to(folder.parent / "elsewhere")
            elif what == "a pipe for a shard":
                os.mkfifo(path)


def foreign(base: Path, step: int, *, stable: bool = True) -> Path:
    """A version as prime-rl writes it: shards by the real library, index, STABLE."""
    folder = base / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for at in range(2):
        name, shard = f"layers.{at}.weight", f"model-{at + 1:05d}-of-00002.safetensors"
        tensors = {name: np.full((4, 2), step, dtype=np.float32)}
        safetensors.numpy.save_file(tensors, folder / shard, metadata={"format": "pt"})
        listed[name] = shard
    index = {"metadata": {"total_size": 64}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    if stable:
        (folder / "STABLE").touch()
    return folder
