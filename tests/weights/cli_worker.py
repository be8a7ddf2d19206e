"""A publisher or a consumer in a process of its own, for the tests of `holdfast weights`.

cli_worker.py publish ROOT URL NUMBER...     publish these versions, then end
cli_worker.py consume ROOT URL NAME NUMBER LEASE_S
    serve a version, keep it pinned and staged; say "ready"; leave when told so on stdin
"""

import asyncio
import sys

import numpy as np

from holdfast import ledger
from holdfast.weights import Publisher, Retention, Subscriber


async def publish(root: str, url: str, *numbers: str) -> None:
    async with (
        ledger.open(url) as led,
        Publisher(root, led, "policy", Retention(keep_last=9)) as publisher,
    ):
        for number in map(int, numbers):
            await publisher.publish(number, {"a": np.full(8, number, np.float32)})


async def consume(root: str, url: str, name: str, number: str, lease_s: str) -> None:
    async with (
        ledger.open(url) as led,
        Subscriber(root, led, "policy", name, lease_s=float(lease_s)) as subscriber,
        subscriber.pin(int(number)) as pin,
    ):
        await pin.stage()
        await subscriber.acknowledge(pin.number)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    work = publish if sys.argv[1] == "publish" else consume
    asyncio.run(work(*sys.argv[2:]))
