"""What processes of either side do: `python programs.py NAME ARGUMENTS…`.

Each takes orders (one JSON object per line on standard input) and answers each with one. Only what
both versions of the package have is used here. No torch: these start quickly.
"""

import http.server
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import holdfast

LIMIT_S = 100.0


def say(**what: object) -> None:
    """Tell the test one thing."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def orders() -> Iterator[dict[str, Any]]:
    """What the test says, until it is gone."""
    say(package=str(Path(holdfast.__file__).parent))
    for line in sys.stdin:
        yield json.loads(line)


def tensors(number: int) -> dict[str, Any]:
    """The weights of a version: one tensor that changes, one that does not."""
    changing = np.arange(64, dtype=np.float32) + 1000 * number
    return {"layers.0.weight": changing, "frozen.weight": np.arange(4096, dtype=np.int16)}


def publish(root: str, url: str) -> None:
    """Publish versions; `keep` of them are kept."""
    from holdfast.weights import Retention, open_publisher

    with open_publisher(root, url or None, "policy", Retention(keep_last=1)) as publisher:
        for order in orders():
            number = int(order["publish"])
            made = publisher.publish(number, tensors(number), files={"config.json": b"{}"})
            say(version=made.version, content=made.content)


def subscribe(root: str, url: str, name: str) -> None:
    """Load versions, compare every byte, acknowledge; with `hold`, keep the last one pinned."""
    from holdfast.weights import open_subscriber

    with open_subscriber(root, url or None, "policy", name, needs="latest") as subscriber:
        taken = orders()
        for order in taken:
            number = int(order["load"])
            content = subscriber.wait_for(number, timeout_s=LIMIT_S).content
            with subscriber.pin(number) as pin:
                right = all(
                    np.array_equal(pin.numpy(key), value) for key, value in tensors(number).items()
                )
                if order.get("hold"):
                    say(pinned=pin.number, right=right, content=content)
                    next(taken)
                    pin.check()
                    right = right and bool(pin.numpy("layers.0.weight")[0] == 1000 * number)
                subscriber.acknowledge(number)
            say(loaded=number, right=right, content=content)


def queue(store: str, url: str, name: str, lease_s: str = "10") -> None:
    """Put samples, or claim, fetch and acknowledge them."""
    from holdfast.transfer.queue import Item, open_queue

    given: dict[str, Any] = {"member": name, "lease_s": float(lease_s)}
    with open_queue(store, url, "rollouts", {"train": ["tokens", "reward"]}, **given) as there:
        for order in orders():
            if "put" in order:
                keys = order["put"]
                items = [
                    Item(key, {"tokens": np.arange(int(key[1:]))}, group="g", version=3)
                    for key in keys
                ]
                put = there.put(items)
                there.put_fields({key: {"reward": float(key[1:])} for key in keys})
                say(put=sorted(put))
            else:
                batch = there.claim("train", int(order["claim"]), timeout_s=LIMIT_S)
                values = batch.fetch()
                right = all(
                    value["reward"] == len(value["tokens"]) == int(key[1:])
                    for key, value in zip(batch.keys, values, strict=True)
                )
                if order.get("acknowledge", True):
                    batch.acknowledge()
                say(claimed=sorted(batch.keys), right=right)


VALUES: dict[str, Any] = {
    "none": None,
    "empty": b"",
    "bytes": bytes(range(256)),
    "plain": {"a": [1, (2, 3)], "b": {4, 5}, "c": "grün"},
    "array": np.arange(1000, dtype=np.float32).reshape(10, 100),
}


def store(url: str) -> None:
    """Put values into a store, get them, view them, delete them."""
    from holdfast import transfer

    with transfer.connect(url) as there:
        for order in orders():
            names = {f"{order['prefix']}/{key}": value for key, value in VALUES.items()}
            if order["do"] == "put":
                refs = there.put(names)
                say(refs={key: [one.generation, one.nbytes] for key, one in refs.items()})
            elif order["do"] == "get":
                found = there.get(list(names))
                with there.view([f"{order['prefix']}/array"]) as seen:
                    right = _same(seen[f"{order['prefix']}/array"], VALUES["array"])
                say(right=right and all(_same(found[key], names[key]) for key in names))
            else:
                say(deleted=there.delete(list(names)))


def _same(left: object, right: object) -> bool:
    if isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def trainer() -> None:
    """A trainer with the fence, that says who it is; it ends with its host."""
    from holdfast.jobs.fence import Incarnation

    who = Incarnation.from_env()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            heads = [(key.lower().encode(), text.encode()) for key, text in self.headers.items()]
            meant = who.is_meant(heads)
            package = str(Path(holdfast.__file__).parent)
            raw = json.dumps({"epoch": who.epoch, "pid": os.getpid(), "package": package}).encode()
            self.send_response(200 if meant else 421)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_GET  # noqa: N815 -- the library looks for this name

        def log_message(self, *_: object) -> None:
            pass

    address = (os.environ["HOST"], int(os.environ["PORT"]))
    server = http.server.ThreadingHTTPServer(address, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parent = os.getppid()
    while os.getppid() == parent:
        threading.Event().wait(0.2)


PROGRAMS: dict[str, Callable[..., None]] = {
    "publish": publish,
    "subscribe": subscribe,
    "queue": queue,
    "store": store,
    "trainer": trainer,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
