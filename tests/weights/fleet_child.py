"""The child processes of `test_fleet.py` and `test_loss.py`: `python fleet_child.py NAME JSON`.

A replica answers on a loopback port, one JSON line per connection, with what it computes. No
torch here: the children should start quickly. Times are those of the monotonic clock, which all
processes of a machine share.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from holdfast import ledger
from holdfast.contrib.fleets.fleet import Fleet, FleetPolicy
from holdfast.contrib.fleets.replica import Engine, Replica
from holdfast.errors import Mistake, Unavailable
from holdfast.weights import Pin, Subscriber
from kids import be
from weights.children import say, told

ITEMS = 8


def weights(version: int) -> list[float]:
    """The only tensor of a version."""
    return [float(version * (100 + item)) for item in range(ITEMS)]


def number(version: int) -> float:
    """What a replica of this version computes."""
    return sum(weights(version))


class NumpyEngine(Engine):
    """The only tensor as a numpy array; versions in `refuses` do not fit."""

    def __init__(self, refuses: list[int]) -> None:
        self.w = np.zeros(ITEMS, np.float32)
        self.refuses = refuses

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`."""
        if pin.number in self.refuses:
            raise Mistake(f"version {pin.number} does not fit")

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`."""
        self.w[:] = pin.numpy("w")


async def replica(
    root: str, url: str, name: str, port: int, lease_s: float, refuses: list[int]
) -> None:
    """Serve until killed."""
    engine = NumpyEngine(refuses)
    async with (
        ledger.open(url) as led,
        Subscriber(
            root,
            led,
            "policy",
            name,
            needs="latest",
            address=f"127.0.0.1:{port}",
            lease_s=lease_s,
        ) as subscriber,
        Replica(subscriber, engine) as one,
    ):

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = json.loads(await reader.readline())
            try:
                async with one.admit(timeout_s=asked["wait_s"]) as version:
                    begun, seat, before = (
                        time.monotonic(),
                        subscriber.seat_id,
                        float(engine.w.sum()),
                    )
                    await asyncio.sleep(asked["work_s"])
                    answer: dict[str, Any] = {
                        "name": name,
                        "seat": seat,
                        "version": version,
                        "begun": begun,
                        "numbers": [before, float(engine.w.sum())],
                        "ended": time.monotonic(),
                    }
            except Unavailable as error:
                answer = {"refused": str(error)}
            writer.write(json.dumps(answer).encode() + b"\n")
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1", port):
            say("ready")
            await asyncio.Event().wait()


async def owner(url: str, version: int, stage_s: float, hold_s: float) -> None:
    """Update the fleet, if nobody kills us before."""
    async with (
        ledger.open(url) as led,
        Fleet(led, "policy", FleetPolicy(stage_s=stage_s, hold_s=hold_s)) as fleet,
    ):
        say("ready")
        done = await fleet.update(version)
        say("done", serving=done.serving)


async def engine(fragile: str) -> None:
    """Hold one version, and another aside; be killed in the call that is `fragile`."""
    aside = held = 0.0
    while line := await told():
        asked = json.loads(line)
        if asked["do"] == fragile:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked["do"] == "stage":
            [file] = Path(asked["path"]).glob("*.safetensors")
            aside = float(safetensors.numpy.load_file(file)["w"].sum())
        elif asked["do"] == "switch":
            held, aside = aside, 0.0
        say(asked["do"], held=held)


if __name__ == "__main__":
    be(replica, owner, engine)
