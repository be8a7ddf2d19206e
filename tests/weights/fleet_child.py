"""The child processes of `test_fleet.py`: `python fleet_child.py NAME JSON`.

A replica answers on a loopback port, one JSON line per connection, with what its module
computes. Times are those of the monotonic clock, which all processes of a machine share.
"""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from holdfast import ledger
from holdfast.errors import Unavailable
from holdfast.weights import Pin, Subscriber
from holdfast.weights.fleet import Fleet, FleetPolicy
from holdfast.weights.replica import ModuleEngine, Replica

ITEMS = 8


def weights(version: int) -> list[float]:
    """The only tensor of a version."""
    return [float(version * (100 + item)) for item in range(ITEMS)]


def number(version: int) -> float:
    """What a replica of this version computes."""
    return sum(weights(version))


def say(what: str, **fields: object) -> None:
    """Tell the parent one thing."""
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


async def replica(
    root: str, url: str, name: str, port: int, lease_s: float, refuses: list[int]
) -> None:
    """Serve until killed. Versions in `refuses` do not fit into this replica's module."""
    import torch

    torch.set_num_threads(1)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(ITEMS), requires_grad=False)

        def forward(self) -> float:
            return float(self.w.sum())

    class Picky(ModuleEngine):
        async def stage(self, pin: Pin) -> None:
            if pin.number in refuses:
                pin.fits({"w": torch.zeros(3)})
            await super().stage(pin)

    module = Module()
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
        Replica(subscriber, Picky(module)) as one,
    ):

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = json.loads(await reader.readline())
            try:
                async with one.admit(timeout_s=asked["wait_s"]) as version:
                    begun, seat, before = time.monotonic(), subscriber.seat_id, module()
                    await asyncio.sleep(asked["work_s"])
                    answer: dict[str, Any] = {
                        "name": name,
                        "seat": seat,
                        "version": version,
                        "begun": begun,
                        "numbers": [before, module()],
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


if __name__ == "__main__":
    asyncio.run({"replica": replica, "owner": owner}[sys.argv[1]](**json.loads(sys.argv[2])))
