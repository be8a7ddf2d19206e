"""The calls that are put through two back ends: every public one, with every kind of value.

Each script runs in partitions of its own and clears them. A step whose answers differ between
SimpleStorage and Holdfast by design has `differs` in its label, with why; there the answers must
differ, so that the list stays true.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers.transferqueue.answers import Recorder
from peers.transferqueue.system import NonTensorData, NonTensorStack, TensorDict, ray, tq
from transfer.samples import objects

__all__ = ["SCRIPTS"]

KEYS = ["a", "b", "c"]


@dataclasses.dataclass
class Own:
    """A class of the caller's."""

    number: int = 1


Pair = collections.namedtuple("Pair", "left right")


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    """A nested tensor, one row each."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def columns() -> dict[str, Any]:
    """Columns of three rows, of every kind that a TensorDict may have. All travel."""
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool]
    dtypes += [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64]
    found: dict[str, Any] = {
        str(dtype): torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype) for dtype in dtypes
    }
    return found | {
        "one dimension": torch.arange(3),
        "four dimensions": torch.arange(24.0).reshape(3, 2, 2, 2),
        "not contiguous": torch.arange(6.0).reshape(2, 3).t(),
        "expanded": torch.ones(1, 2).expand(3, 2),
        "empty rows": torch.empty(3, 0),
        "nan and inf": torch.tensor([[float("nan")], [float("inf")], [-0.0]]),
        "with gradients": torch.ones(3, 2, requires_grad=True),
        "jagged": jagged(torch.arange(2), torch.arange(5), torch.arange(1)),
        "jagged, equal": jagged(torch.ones(2), torch.ones(2), torch.ones(2)),
        "jagged, two dimensions": jagged(torch.ones(2, 3), torch.ones(1, 3), torch.ones(4, 3)),
        "strided": torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(1, 2), torch.ones(4, 4)]
        ),
        "jagged, one empty": jagged(torch.ones(2), torch.ones(0), torch.ones(1)),
        "text": ["x", "", "ä€"],
        "bytes": NonTensorStack(b"x", b"", b"\x00\xff"),
        "numbers": NonTensorStack(1, 2.5, 10**18),
        "booleans": NonTensorStack(True, False, True),
        "with None": NonTensorStack(None, "x", None),
        "all None": NonTensorStack(None, None, None),
        "dictionaries": [{"role": "user", "n": [1, {"x": None}]}, {}, {"a": [1, 2]}],
        "lists": NonTensorStack([1, 2], [], ["a", [None]]),
        "mixed": NonTensorStack(1, "a", {"b": b"c"}),
        "tensors and objects": NonTensorStack(torch.ones(2), "a", torch.zeros(1)),
        "tensors inside": NonTensorStack({"t": torch.arange(3)}, {"t": np.arange(2)}, {}),
        "arrays": NonTensorStack(np.arange(2), np.zeros((2, 2), np.float32), np.arange(0)),
        "numpy's numbers": NonTensorStack(np.float32(1.5), np.int64(3), np.bool_(True)),
        "an array of numbers": np.arange(6).reshape(3, 2),
        "an array of text": np.array(["x", "", "äöü"]),
        "an array of bytes": np.array([b"x", b"", b"yz"]),
        "an array of objects": objects("x", {"a": [1]}, None),
        "an array of lists": objects([1, 2], [], [3]),
        "an array of equal lists": np.array([[1, "a"], [2, "b"], [3, None]], dtype=object),
        "arrays of objects as rows": NonTensorStack(
            np.array(["x", None], dtype=object), np.array(["a", "bc"]), objects([1], {"b": 2})
        ),
        "a wrapped list": NonTensorData(data=["x", {"y": 1}, None], batch_size=(3,)),
        "a wrapped list of lists": NonTensorData(data=[[1, 2], [], [3]], batch_size=(3,)),
        "a wrapped list of tensors": NonTensorData(
            data=[torch.ones(2), torch.ones(1), torch.ones(3)], batch_size=(3,)
        ),
        "a wrapped array": NonTensorData(data=objects("x", [1], None), batch_size=(3,)),
        "a wrapped array of text": NonTensorData(data=np.array(["x", "y", "z"]), batch_size=(3,)),
        "a wrapped array of numbers": NonTensorData(data=np.arange(3), batch_size=(3,)),
        "a wrapped tensor": NonTensorData(data=torch.arange(6).reshape(3, 2), batch_size=(3,)),
        "a tuple": ("x", "y", "z"),
    }


def odd_columns() -> dict[str, tuple[Any, str]]:
    """Columns that do not travel here, or not there, and why."""
    pickled = "SimpleStorage pickles it"
    alone = "SimpleStorage has no word for one object for all rows"
    return {
        "own class": (NonTensorStack(Own(1), Own(2), Own(3)), pickled),
        "named tuples": (NonTensorStack(Pair(1, 2), Pair(3, 4), Pair(5, 6)), pickled),
        "dtypes": (NonTensorStack(torch.float32, torch.int8, torch.bool), pickled),
        "dates": (NonTensorStack(*np.array(["2020-01-01"] * 3, "M8[D]")), pickled),
        "tuples and sets": (NonTensorStack((1, "a"), {1}, frozenset({3})), "there, lists"),
        "one text": (NonTensorData(data="abc", batch_size=(3,)), alone),
        "one number": (NonTensorData(data=7, batch_size=(3,)), alone),
        "one dictionary": (NonTensorData(data={"a": 1}, batch_size=(3,)), alone),
    }


def kinds(call: Recorder, _: Path) -> None:
    """Every kind of value, put as a batch, got whole, in part and in another order."""
    for name, column in columns().items():
        part = f"kind {name}"
        fields = TensorDict({"v": column}, batch_size=3)
        call(f"{part}: put", tq.kv_batch_put, keys=KEYS, partition_id=part, fields=fields)
        call(f"{part}: get", tq.kv_batch_get, keys=KEYS, partition_id=part)
        call(f"{part}: some", tq.kv_batch_get, keys=["c", "a"], partition_id=part)
        call(f"{part}: one", tq.kv_batch_get, keys="b", partition_id=part)
        call(f"{part}: clear", tq.kv_clear, keys=KEYS, partition_id=part)
    for name, (column, why) in odd_columns().items():
        part = f"odd {name}"
        fields = TensorDict({"v": column}, batch_size=3)
        call(
            f"{part}: put differs: {why}",
            lambda f=fields, p=part: (
                tq.kv_batch_put(keys=KEYS, partition_id=p, fields=f),
                tq.kv_batch_get(keys=KEYS, partition_id=p),
            ),
        )
        call(f"{part}: clear", tq.kv_clear, keys=KEYS, partition_id=part)
    inner = TensorDict({"v": TensorDict({"y": torch.ones(3, 2)}, batch_size=3)}, batch_size=3)
    why = "SimpleStorage takes it, and cannot give it back"
    call(f"td: put differs: {why}", tq.kv_batch_put, keys=KEYS, partition_id="td", fields=inner)
    call("td: get", tq.kv_batch_get, keys=KEYS, partition_id="td")
    short = TensorDict({"v": NonTensorData(data=["x", "y"], batch_size=(3,))}, batch_size=3)
    call("two items for three: put", tq.kv_batch_put, keys=KEYS, partition_id="2", fields=short)
    for part in ("td", "2"):
        call(f"{part}: clear", tq.kv_clear, keys=KEYS, partition_id=part)


def single(call: Recorder, _: Path) -> None:
    """One key at a time: plain dictionaries, TensorDicts, tags alone, later fields."""
    values: dict[str, Any] = {
        "tensor": torch.arange(3),
        "number tensor": torch.tensor(1.5),
        "text": "x",
        "none": None,
        "list": [1, "a"],
        "dictionary": {"a": [1]},
        "array": np.arange(3),
        "array of objects": np.array(["x", None], dtype=object),
        "array of text": np.array(["x", "yz"]),
    }
    part = "single"
    for name, value in values.items():
        call(f"{name}: put", tq.kv_put, key=name, partition_id=part, fields={name: value})
        call(f"{name}: get", tq.kv_batch_get, keys=name, partition_id=part, select_fields=name)
    call("tag", tq.kv_put, key="text", partition_id=part, tag={"score": 0.5})
    call("tag and field", tq.kv_put, "text", part, {"more": torch.ones(2)}, {"score": 1})
    call("both fields", tq.kv_batch_get, "text", part)
    call("neither", tq.kv_put, key="text", partition_id=part)
    call("wrong fields", tq.kv_put, key="text", partition_id=part, fields=[1])
    nested = jagged(torch.ones(1), torch.ones(2))
    call("nested", tq.kv_put, key="n", partition_id=part, fields={"x": nested})
    call("as TensorDict", tq.kv_put, "td", part, TensorDict({"x": torch.ones(1, 2)}, [1]))
    call("list", tq.kv_list, part)
    call("partitions", lambda: sorted(tq.get_client().get_partition_list()))
    call("clear one", tq.kv_clear, keys="td", partition_id=part)
    call("list again", tq.kv_list, part)
    call("clear part", tq.get_client().clear_partition, part)
    call("list all", tq.kv_list)


def batch(*numbers: float) -> Any:
    """A batch with three fields."""
    return TensorDict(
        {
            "x": torch.tensor([[number, number + 0.5] for number in numbers]),
            "o": NonTensorStack(*({"n": number} for number in numbers)),
            "j": jagged(*(torch.full((int(number) % 3 + 1,), number) for number in numbers)),
        },
        batch_size=len(numbers),
    )


def tasks(call: Recorder, _: Path) -> None:
    """The client: metadata, consumption, production, updates, clearing samples and partitions."""
    part, client = "tasks", tq.get_client()
    call("put", client.put, batch(*range(6)), partition_id=part)
    call("ready", client.check_production_status, ["x", "o"], part)
    call("not ready", client.check_production_status, ["x", "y"], part)
    call("produced", client.get_production_status, ["x"], part)
    meta = call("first", client.get_meta, ["x", "o"], 4, part, task_name="train")
    call("first data", client.get_data, meta)
    call("consumed", client.get_consumption_status, "train", part)
    call("all consumed", client.check_consumption_status, "train", part)
    doubled = TensorDict({"y": torch.arange(4.0).unsqueeze(1)}, batch_size=4)
    after = call("later field", client.put, doubled, metadata=meta)
    call("with the later field", client.get_data, after)
    call("selected", client.get_data, after.select_fields(["y", "x"]))
    call("some rows", client.get_data, after.select_samples([2, 0]))
    call("in two", lambda: [client.get_data(one) for one in after.chunk(2)])
    call("second", client.get_meta, ["x"], 2, part, task_name="train")
    call("all consumed now", client.check_consumption_status, "train", part)
    call("another task", client.get_meta, ["x", "y"], 4, part, task_name="log")
    call("by force", client.get_meta, ["x", "y"], 6, part, mode="force_fetch")
    after.update_custom_meta([{"score": n} for n in range(4)])
    call("custom meta", client.set_custom_meta, after)
    call("reset", client.reset_consumption, part, "train")
    again = call("again", client.get_meta, ["x", "j", "o"], 6, part, task_name="train")
    call("again data", client.get_data, again)
    call("replace", client.put, batch(*range(10, 16)), metadata=again)
    fresh = call("fresh meta", client.get_meta, ["x", "j", "o"], 6, part, mode="force_fetch")
    call("replaced", client.get_data, fresh)
    call("clear samples", client.clear_samples, fresh.select_samples([0, 1]))
    call("status after", client.get_production_status, ["x"], part)
    call("clear", client.clear_partition, part)
    call("gone", client.check_production_status, ["x"], part)


def reuse(call: Recorder, _: Path) -> None:
    """Keys and indices that are used again after they were cleared, in other shapes and kinds."""
    part = "reuse"
    lives: list[tuple[list[str], Any]] = [
        (["a", "b"], TensorDict({"x": torch.ones(2, 2)}, 2)),
        (["b", "c"], TensorDict({"x": torch.zeros(2, 5)}, 2)),
        (["a", "b"], TensorDict({"x": ["s", "t"], "z": torch.ones(2, 1)}, 2)),
        (["c"], TensorDict({"z": NonTensorStack(None)}, 1)),
    ]
    for number, (keys, fields) in enumerate(lives):
        call(f"{number} put", tq.kv_batch_put, keys, part, fields, [{"n": number}] * len(keys))
        call(f"{number} get", tq.kv_batch_get, keys, part)
        call(f"{number} other order", tq.kv_batch_get, keys[::-1], part)
        call(f"{number} list", tq.kv_list, part)
        call(f"{number} again", tq.kv_batch_put, keys, part, fields)
        call(f"{number} got again", tq.kv_batch_get, keys, part)
        call(f"{number} clear", tq.kv_clear, keys, part)
        call(f"{number} gone", tq.kv_batch_get, keys, part)
        call(f"{number} list after", tq.kv_list, part)
    one, two = "reuse one", "reuse two"
    for part in (one, two):
        call(f"{part} put", tq.kv_batch_put, ["a", "b"], part, batch(1, 2))
    call("clear one", tq.kv_clear, ["a", "b"], one)
    call("two stays", tq.kv_batch_get, ["a", "b"], two)
    call("a third", tq.kv_batch_put, ["a", "b"], "reuse three", batch(7, 8))
    call("two still", tq.kv_batch_get, ["b", "a"], two)
    for part in (two, "reuse three"):
        call(f"{part} end", tq.get_client().clear_partition, part)


def by_meta(call: Recorder, _: Path) -> None:
    """Metadata of keys: got by it, fields chosen, joined and divided."""
    part = "by meta"
    meta = call("put", tq.kv_batch_put, KEYS, part, batch(1, 2, 3), [{"n": n} for n in range(3)])
    call("get", tq.kv_batch_get_by_meta, meta)
    call("a field", tq.kv_batch_get_by_meta, meta, select_fields="x")
    call("fields", tq.kv_batch_get_by_meta, meta, select_fields=["j", "o"])
    call("chosen", tq.kv_batch_get, KEYS, part, select_fields=["o"])
    call("no such field", tq.kv_batch_get, KEYS, part, select_fields=["nope"])
    call("no such keys", tq.kv_batch_get, ["x", "y"], part)
    call("no such part", tq.kv_batch_get, KEYS, "nowhere")
    call("wrong count", tq.kv_batch_put, ["a"], part, batch(1, 2))
    left_out = (
        "" if tq.__version__ == "0.1.8" else " differs: since 0.1.9 a missing key is left out"
    )
    call(f"one missing{left_out}", tq.kv_batch_get, ["a", "x"], part)
    client = tq.get_client()
    found = call("meta of keys", client.kv_retrieve_meta, KEYS, part)
    call("keys of meta", client.kv_retrieve_keys, found.global_indexes, part)
    call("data of it", client.get_data, found)
    call("clear", tq.kv_clear, KEYS, part)


def asynchronous(call: Recorder, _: Path) -> None:
    """The asynchronous twins, several at once."""
    part = "async"

    async def work() -> Any:
        await tq.async_kv_put("k", part, {"x": torch.ones(2)}, {"t": 1})
        fields = TensorDict({"x": torch.arange(6.0).reshape(3, 2)}, 3)
        meta = await tq.async_kv_batch_put(KEYS, part, fields)
        found = await asyncio.gather(
            *(tq.async_kv_batch_get(key, part) for key in (*KEYS, "k")),
            tq.async_kv_batch_get_by_meta(meta),
        )
        listed = await tq.async_kv_list(part)
        await tq.async_kv_clear([*KEYS, "k"], part)
        return meta, found, listed, await tq.async_kv_list(part)

    call("all", lambda: asyncio.run(work()))
    client = tq.get_client()

    async def tasks_too() -> Any:
        put = await client.async_put(batch(1, 2), partition_id=part)
        meta = await client.async_get_meta(["x"], 2, part, task_name="t")
        data = await client.async_get_data(meta)
        states = [
            await client.async_check_production_status(["x"], part),
            await client.async_check_consumption_status("t", part),
            await client.async_get_production_status(["x"], part),
            await client.async_get_consumption_status("t", part),
            await client.async_reset_consumption(part, "t"),
            sorted(await client.async_get_partition_list()),
        ]
        await client.async_clear_samples(meta)
        await client.async_clear_partition(part)
        return put, meta, data, states

    call("client", lambda: asyncio.run(tasks_too()))


def streaming(call: Recorder, _: Path) -> None:
    """The loader: every row once, with its metadata."""
    part = "streaming"
    conf = ray.get(ray.get_actor("TransferQueueController", "transfer_queue").get_config.remote())
    tq.get_client().put(batch(*range(8)), partition_id=part)
    dataset = tq.StreamingDataset(
        config=conf,
        batch_size=4,
        micro_batch_size=2,
        data_fields=["x", "o"],
        partition_id=part,
        task_name="train",
        dp_rank=0,
        should_check_consumption_status=True,
    )
    loader = tq.StreamingDataLoader(dataset, num_workers=0)
    call("batches", lambda: [(data, meta.global_indexes) for data, meta in loader])
    call("clear", tq.get_client().clear_partition, part)


def parsed(call: Recorder, _: Path) -> None:
    """What only SimpleStorage does."""
    part, why = "parsed", "only SimpleStorage parses; the others say so"

    def parse(fields: Any) -> Any:  # in here, so that it travels by value
        fields["x"] = [text.upper() for text in fields["x"]]
        return fields

    call(
        f"put differs: {why}",
        lambda: tq.kv_put(key="a", partition_id=part, fields={"x": "url"}, data_parser=parse),
    )
    call("clear", tq.kv_clear, keys="a", partition_id=part)


def checkpoints(call: Recorder, folder: Path) -> None:
    """Saved, changed or cleared, and loaded: all of it is there again, as it was."""
    if not hasattr(tq, "save_checkpoint"):
        return  # before 0.1.9
    part, client = "saved", tq.get_client()
    call("put", tq.kv_batch_put, KEYS, part, batch(1, 2, 3), [{"n": n} for n in range(3)])
    call("task", client.get_meta, ["x"], 2, part, task_name="train")
    call("save", tq.save_checkpoint, folder / "one", metadata={"step": 7})
    call("change", tq.kv_batch_put, ["a", "d"], part, batch(8, 9))
    call("clear some", tq.kv_clear, ["b"], part)
    call("changed", tq.kv_list, part)
    call("load", tq.load_checkpoint, folder / "one")
    call("loaded", tq.kv_batch_get, KEYS, part)
    call("list", tq.kv_list, part)
    call("rest", client.get_meta, ["x"], 1, part, task_name="train")
    call("save again", tq.save_checkpoint, folder / "two")
    call("clear", tq.kv_clear, KEYS, part)
    call("load again", tq.load_checkpoint, folder / "two")
    call("loaded again", tq.kv_batch_get, KEYS, part)
    call("load nothing", tq.load_checkpoint, folder / "three")
    call("end", client.clear_partition, part)


SCRIPTS: list[Callable[[Recorder, Path], None]] = [
    *(kinds, single, tasks, reuse, by_meta, asynchronous, streaming, parsed, checkpoints),
]
