"""A trainer that only counts, for tests: what it did is in the ledger, once per operation.

    HOLDFAST_LEDGER=sqlite:///run.db HOLDFAST_RUN=r HOLDFAST_JOB=acme/one HOLDFAST_EPOCH=1 \
        PORT=8001 python tests/jobs/counting_trainer.py

It speaks enough of the Tinker protocol for the real `tinker` and `fireworks-ai` clients.

- An operation (model, number) takes effect in one transaction: this incarnation is still the
  job's present one, the operation is not there yet, its predecessor was the last one. The
  promise is given after that, so a promise is never lost, whatever dies.
- A duplicate gets the same promise, and the result that is recorded.
- Results are made from the record, so a successor answers its predecessor's futures.
- An operation whose predecessor is missing waits for it inside the request, and is told to
  come again (503) after a while.

`COUNTING_DELAY_S` lets results take some time, so that polls are held.
"""

import asyncio
import json
import math
import os
import struct
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from holdfast import ledger as ledgers
from holdfast.errors import UnknownOutcome
from holdfast.jobs.fence import Incarnation
from holdfast.ledger import Get, Ledger, Put, absent, join, value_is
from holdfast.proc import die_with_parent

PROTOBUF = "application/x-protobuf"
MODEL = "holdfast/counting"
NUMBERED = ("forward", "forward_backward", "optim_step", "save_weights")
FIXED: dict[tuple[str, str], Any] = {
    ("GET", "healthz"): {"status": "ok"},
    ("GET", "get_server_capabilities"): {
        "supported_models": [{"model_name": MODEL, "max_context_length": 4096}],
        "probe": "/api/v1/probe",
    },
    ("POST", "client/config"): {},
    ("POST", "client/dynamic_config"): {},
    ("POST", "session_heartbeat"): {},
    ("POST", "telemetry"): {"status": "accepted"},
}
MAX_BODY_BYTES = 64 << 20
_STEP_S = 0.02


class Keys:
    """Where one job's counts are."""

    def __init__(self, run: str, account: str, job: str) -> None:
        self.root = join("runs", run, "counting", account, job) + "/"
        self.models = self.root + "models/"
        self.ops = self.root + "ops/"

    def model(self, model: str) -> str:
        """How many operations the model has had, as digits."""
        return self.models + join(model)[1:]

    def op(self, model: str, seq: int) -> str:
        """What operation `seq` was, and what it gave."""
        return self.ops + join(model, f"{seq:08}")[1:]


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def reply(status: int, value: object, **headers: str) -> Reply:
    """An answer in JSON."""
    named = tuple((name.replace("_", "-"), text) for name, text in headers.items())
    return Reply(status, json.dumps(value).encode(), headers=named)


def problem(status: int, code: str, message: str, **headers: str) -> Reply:
    """An answer that says what went wrong. A trainer's own 404 is sure."""
    if status == 404:
        headers["x_should_retry"] = "false"
    return reply(status, {"error": {"code": code, "message": message}}, **headers)


class Counting:
    """The trainer, without its HTTP server: `answer` is all there is."""

    hold_s = 10.0
    """How long a poll is held."""
    order_s = 20.0
    """How long an operation waits for its predecessor."""

    def __init__(self, ledger: Ledger, incarnation: Incarnation, delay_s: float = 0.0) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self.keys = Keys(incarnation.run, incarnation.account, incarnation.job)
        self.delay_s = delay_s
        self.engine_dead = False
        """For tests of what a probe finds out: everything answers, nothing computes."""

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Answer one request; `headers` have names in lower case."""
        name = path.removeprefix("/api/v1/")
        if (method, name) in FIXED:
            return reply(200, FIXED[method, name])
        if name.startswith("sessions/") and name.endswith("/finish"):
            return Reply(200, b"")
        if name == "probe":
            return await self._probe()
        try:
            ask = read(name, headers, body)
        except (ValueError, KeyError) as error:
            return problem(400, "bad_request", f"{type(error).__name__}: {error}")
        if name == "create_session":
            return reply(200, {"type": "create_session", "session_id": uuid.uuid4().hex})
        if name == "create_model":
            return await self._create(ask)
        if name == "get_info":
            return await self._info(ask)
        if name == "unload_model":
            return reply(200, {"request_id": f"{ask['model_id']}:unload"})
        if name == "retrieve_future":
            wants = headers.get("accept", "")
            return await self._retrieve(str(ask["request_id"]), protobuf=PROTOBUF in wants)
        if name in NUMBERED:
            return await self._apply(name, ask)
        return problem(404, "no_such_path", f"there is no {name[:80]}")

    async def _probe(self) -> Reply:
        """Do what training calls need, without counting: read and compute."""
        if self.engine_dead:
            return problem(500, "engine", "the engine has died")
        await self._ledger.get(self.keys.root + "probe")
        return reply(200, {"type": "probe", "computed": outputs([3])[0][0]})

    async def _create(self, ask: Mapping[str, Any]) -> Reply:
        model = f"{ask['session_id']}-{ask['model_seq_id']}"
        key = self.keys.model(model)
        while await self._ledger.get(key) is None:
            if await self._commit([absent(key)], [Put(key, b"0")], key) is None:
                return self._replaced()
        return reply(200, {"request_id": f"{model}:create", "model_id": model})

    async def _info(self, ask: Mapping[str, Any]) -> Reply:
        model = str(ask["model_id"])
        if await self._ledger.get(self.keys.model(model)) is None:
            return problem(404, "no_such_model", f"there is no model {model[:80]}")
        data = {"arch": "counting", "model_name": MODEL, "tokenizer_id": MODEL}
        return reply(200, {"model_id": model, "model_data": data, "is_lora": True, "lora_rank": 1})

    # ---- operations ------------------------------------------------------------

    async def _apply(self, name: str, ask: Mapping[str, Any]) -> Reply:
        model, seq = str(ask["model_id"]), int(ask["seq_id"])
        key, counter = self.keys.op(model, seq), self.keys.model(model)
        promise = reply(200, {"request_id": f"{model}:{seq}", "model_id": model})
        until = time.monotonic() + self.order_s
        while True:
            found = await self._ledger.txn((), [Get(key), Get(counter)])
            op, count = found.results
            if op is not None:
                return promise
            if count is None:
                return problem(404, "no_such_model", f"there is no model {model[:80]}")
            before = str(seq - 1).encode()
            if count.value == before:
                record = self._record(name, seq, ask)
                conditions = [absent(key), value_is(counter, before)]
                puts = [Put(key, record), Put(counter, str(seq).encode())]
                done = await self._commit(conditions, puts, key)
                if done is None:
                    return self._replaced()
                continue  # ours or somebody else's: the record says it
            if time.monotonic() > until:
                text = f"operation {seq} waits for {int(count.value) + 1}: send it again"
                return problem(503, "out_of_order", text, retry_after_ms="200")
            await asyncio.sleep(_STEP_S)

    def _record(self, name: str, seq: int, ask: Mapping[str, Any]) -> bytes:
        return json.dumps(
            {
                "op": name,
                "seq": seq,
                "epoch": self._incarnation.epoch,
                "lengths": ask.get("lengths", []),
                "path": ask.get("path"),
                "ready_at": time.time() + self.delay_s,
            }
        ).encode()

    async def _commit(self, conditions: list[Any], puts: list[Put], key: str) -> bool | None:
        """Whether it took effect; None when this incarnation has been replaced."""
        guard = self._incarnation.guard()
        try:
            done = await self._ledger.txn([guard, *conditions], puts, [Get(guard.key), Get(key)])
        except UnknownOutcome:
            return False  # whoever asked looks at the record
        if done.succeeded:
            return True
        epoch, _ = done.results
        return False if epoch is not None and epoch.value == guard.operand else None

    def _replaced(self) -> Reply:
        return problem(421, "wrong_incarnation", "this incarnation has been replaced")

    # ---- results ---------------------------------------------------------------

    async def _retrieve(self, request: str, *, protobuf: bool) -> Reply:
        model, _, what = request.rpartition(":")
        if what in ("create", "unload"):
            kind = "create_model" if what == "create" else "unload_model"
            return reply(200, {"type": kind, "model_id": model})
        if not model or not what.isdecimal():
            return problem(404, "no_such_future", f"there is no future {request[:80]}")
        entry = await self._ledger.get(self.keys.op(model, int(what)))
        if entry is None:
            return problem(404, "no_such_future", f"there is no future {request[:80]}")
        record = json.loads(entry.value)
        rest_s = record["ready_at"] - time.time()
        if rest_s > 0:
            await asyncio.sleep(min(rest_s, self.hold_s))
            if rest_s > self.hold_s:
                return reply(408, {"queue_state": "active", "queue_state_reason": "counting"})
        return result(record, model, protobuf=protobuf)


def read(name: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """What a request says, whichever way it is written."""
    if headers.get("content-type", "").startswith(PROTOBUF):
        message = import_module("tinker.proto.tinker_public_pb2").ForwardBackwardRequest()
        message.ParseFromString(body)
        lengths = [
            sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
            for datum in message.data
        ]
        ask = {"model_id": message.model_id, "seq_id": message.seq_id, "lengths": lengths}
    else:
        ask = json.loads(body or b"{}")
        if not isinstance(ask, dict):
            raise ValueError("a request is a JSON object")
        given = ask.get(f"{name}_input") or ask.get("forward_backward_input") or {}
        ask["lengths"] = [
            sum(len(chunk.get("tokens", ())) for chunk in datum["model_input"]["chunks"])
            for datum in given.get("data", ())
        ]
    return ask


def outputs(lengths: list[int]) -> list[list[float]]:
    """The log probabilities of a model that knows nothing: every datum gets its own."""
    return [[-math.log(1 + at) for at in range(length)] for length in lengths]


def result(record: Mapping[str, Any], model: str, *, protobuf: bool) -> Reply:
    """What an operation gave, from its record alone."""
    op, seq = record["op"], record["seq"]
    if op == "optim_step":
        return reply(200, {"type": "optim_step", "metrics": {"step:max": float(seq)}})
    if op == "save_weights":
        return reply(200, {"type": op, "path": f"tinker://{model}/weights/{record['path']}"})
    values = outputs(record["lengths"])
    metrics = {"loss:sum": -sum(map(sum, values)), "seq:max": float(seq)}
    if protobuf:
        return Reply(200, _message(values, metrics), PROTOBUF)
    given = [
        {"logprobs": {"data": one, "dtype": "float32", "shape": [len(one)]}} for one in values
    ]
    return reply(
        200,
        {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": given, "metrics": metrics},
    )


def _message(values: list[list[float]], metrics: Mapping[str, float]) -> bytes:
    schema = import_module("tinker.proto.tinker_public_pb2")
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(num_datums=len(values))
    flat = [value for one in values for value in one]
    ends = [0]
    for one in values:
        ends.append(ends[-1] + 4 * len(one))
    tensor = record.fields["logprobs"]
    tensor.data = struct.pack(f"<{len(flat)}f", *flat)
    tensor.offsets = struct.pack(f"<{len(ends)}q", *ends)
    tensor.dtype = schema.DTYPE_FLOAT32
    return bytes(message.SerializeToString())


# ---- the program ---------------------------------------------------------------


async def main() -> None:
    """Serve until the parent ends, or SIGTERM."""
    web = import_module("aiohttp.web")
    incarnation = Incarnation.from_env()
    delay_s = float(os.environ.get("COUNTING_DELAY_S", "0"))
    async with ledgers.open(os.environ["HOLDFAST_LEDGER"]) as ledger:
        counting = Counting(ledger, incarnation, delay_s)

        async def handle(request: Any) -> Any:
            if not incarnation.is_meant(request.raw_headers):
                return web.Response(status=421, headers={"connection": "close"})
            headers = {name.lower(): value for name, value in request.headers.items()}
            answer = await counting.answer(
                request.method, request.path, headers, await request.read()
            )
            told = {"content-type": answer.content_type, **dict(answer.headers)}
            return web.Response(status=answer.status, body=answer.body, headers=told)

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(os.environ["PORT"])).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    asyncio.run(main())
