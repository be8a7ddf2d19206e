"""TransferQueue's public interface over our store: everything comes back as it was put."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peers.transferqueue.system import (
    CHECKPOINTS,
    PROTOTYPE,
    NonTensorData,
    NonTensorStack,
    Place,
    TensorDict,
    column,
    fresh,
    numbers,
    ray,
    rows,
    tq,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings(PROTOTYPE)]


def test_one_key(place: Place) -> None:
    """A key is put with fields and a tag, listed, got, and cleared."""
    part = fresh("one")
    fields = {"ids": torch.tensor([1, 2, 3]), "text": "héllo", "score": torch.tensor(0.5)}
    meta = tq.kv_put(key="a", partition_id=part, fields=fields, tag={"score": 0.9})
    assert sorted(meta.fields) == ["ids", "score", "text"]
    assert tq.kv_list(partition_id=part) == {part: {"a": {"score": 0.9}}}
    data = tq.kv_batch_get(keys="a", partition_id=part)
    assert torch.equal(column(data, "ids")[0], torch.tensor([1, 2, 3]))
    assert column(data, "text") == ["héllo"]
    assert data["score"].tolist() == [0.5]
    tq.kv_put(key="a", partition_id=part, tag={"score": 0.1})
    assert tq.kv_list(partition_id=part) == {part: {"a": {"score": 0.1}}}
    tq.kv_clear(keys="a", partition_id=part)
    assert tq.kv_list(partition_id=part).get(part, {}) == {}
    assert place.names() == []


@pytest.mark.parametrize(
    "row",
    [
        torch.tensor([math.nan, -0.0, math.inf]),
        torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.zeros(0),
        torch.arange(24, dtype=torch.int16).view(2, 3, 4),
        torch.arange(12).view(3, 4).t(),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda row: f"{row.dtype}-{tuple(row.shape)}",
)
def test_tensors_come_back_bit_for_bit(place: Place, row: torch.Tensor) -> None:
    """Same dtype, same shape, same bits; also empty, transposed and with gradients."""
    part = fresh("bits")
    tq.kv_put(key="a", partition_id=part, fields={"x": row})
    (back,) = column(tq.kv_batch_get(keys="a", partition_id=part))
    assert (back.dtype, back.shape) == (row.dtype, row.shape)
    assert back.contiguous().view(torch.uint8).tolist() == (
        row.detach().contiguous().view(torch.uint8).tolist()
    )
    tq.kv_clear(keys="a", partition_id=part)


def test_a_batch_in_any_order(place: Place) -> None:
    """Rows come back in the order in which they are asked for, also twice the same one."""
    part = fresh("batch")
    keys = [f"k{n}" for n in range(50)]
    meta = tq.kv_batch_put(
        keys=keys, partition_id=part, fields=rows(*range(50)), tags=[{"n": n} for n in range(50)]
    )
    assert numbers(tq.kv_batch_get(keys=keys[::-1], partition_id=part)) == [*range(49, -1, -1)]
    assert numbers(tq.kv_batch_get(keys=["k7", "k7"], partition_id=part)) == [7, 7]
    assert numbers(tq.kv_batch_get_by_meta(meta, select_fields="x")) == [*range(50)]
    assert tq.kv_list(partition_id=part)[part]["k9"] == {"n": 9}
    tq.kv_clear(keys=keys, partition_id=part)
    assert place.names() == []


def test_nested_tensors(place: Place) -> None:
    """Rows of different lengths, in both of torch's layouts, come back as they were."""
    part = fresh("nested")
    lengths = [3, 1, 0, 7]
    ragged = [torch.arange(n, dtype=torch.float32) for n in lengths]
    wild = [torch.full((n + 1, 5 - n % 3), float(n)) for n in lengths]
    fields = TensorDict(
        {
            "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "wild": torch.nested.as_nested_tensor(wild, layout=torch.strided),
        },
        batch_size=4,
    )
    keys = list("abcd")
    tq.kv_batch_put(keys=keys, partition_id=part, fields=fields)
    data = tq.kv_batch_get(keys=keys, partition_id=part)
    for field, rows_put in (("ragged", ragged), ("wild", wild)):
        assert [
            torch.equal(*both) for both in zip(column(data, field), rows_put, strict=True)
        ] == ([True] * 4)
    tq.kv_clear(keys=keys, partition_id=part)


def test_objects(place: Place) -> None:
    """Text, bytes, None, numbers, containers and arrays: each is what it was."""
    part = fresh("objects")
    values: list[Any] = [
        None,
        "",
        b"",
        {"role": "user", "content": [1, 2.5, None, ("a", {3})]},
        np.arange(6, dtype=np.int32).reshape(2, 3),
        10**30,
    ]
    keys = [f"k{n}" for n in range(len(values))]
    fields = TensorDict({"o": NonTensorStack(*values)}, batch_size=len(values))
    tq.kv_batch_put(keys=keys, partition_id=part, fields=fields)
    back = column(tq.kv_batch_get(keys=keys, partition_id=part), "o")
    assert [type(one) for one in back] == [type(one) for one in values]
    assert np.array_equal(back[4], values[4])
    assert back[4].dtype == np.int32
    assert [*back[:4], back[5]] == [*values[:4], values[5]]
    tq.kv_clear(keys=keys, partition_id=part)


def test_one_object_for_all_rows(place: Place) -> None:
    """An object that stands for all rows is the value of each, whatever its length."""
    part = fresh("same")
    fields = TensorDict({"s": NonTensorData("abc", batch_size=[3])}, batch_size=3)
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id=part, fields=fields)
    back = column(tq.kv_batch_get(keys=["a", "b", "c"], partition_id=part), "s")
    assert back == ["abc"] * 3
    tq.kv_clear(keys=["a", "b", "c"], partition_id=part)


def test_fields_are_added_and_replaced(place: Place) -> None:
    """A later put adds fields or replaces them; what it replaces is deleted from the store."""
    part = fresh("later")
    tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(1, 2))
    more = TensorDict({"y": torch.tensor([[3], [4]])}, batch_size=2)
    tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=more)
    data = tq.kv_batch_get(keys=["a", "b"], partition_id=part)
    assert (numbers(data), [int(row) for row in column(data, "y")]) == ([1, 2], [3, 4])
    tq.kv_put(key="a", partition_id=part, fields={"x": torch.tensor([9.0])})
    assert numbers(tq.kv_batch_get(["a", "b"], part, select_fields="x")) == [9, 2]
    assert len(place.names()) == 4
    tq.kv_clear(keys=["a", "b"], partition_id=part)
    assert place.names() == []


def test_partitions(place: Place) -> None:
    """The same key in two partitions is two values; clearing one partition leaves the other."""
    one, two = fresh("one"), fresh("two")
    for part, number in ((one, 1), (two, 2)):
        tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(number, number + 10))
    client = tq.get_client()
    assert {one, two} <= set(client.get_partition_list())
    client.clear_partition(one)
    assert len(place.names()) == 2
    assert numbers(tq.kv_batch_get(keys=["a", "b"], partition_id=two)) == [2, 12]
    client.clear_partition(two)
    assert place.names() == []


async def test_asynchronous(place: Place) -> None:
    """The asynchronous twins do the same, many at once."""
    part = fresh("async")

    async def one(number: int) -> float:
        await tq.async_kv_put(
            key=f"k{number}", partition_id=part, fields={"x": torch.tensor([float(number)])}
        )
        data = await tq.async_kv_batch_get(keys=f"k{number}", partition_id=part)
        return numbers(data)[0]

    assert await asyncio.gather(*map(one, range(20))) == [*range(20)]
    meta = await tq.async_kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(1, 2))
    assert numbers(await tq.async_kv_batch_get_by_meta(meta)) == [1, 2]
    assert len((await tq.async_kv_list(part))[part]) == 22
    keys = list((await tq.async_kv_list(part))[part])
    await tq.async_kv_clear(keys=keys, partition_id=part)
    assert place.names() == []


def test_tasks_consume(place: Place) -> None:
    """Each task gets each row once, by metadata; what it produces are new fields of it."""
    part, client = fresh("tasks"), tq.get_client()
    client.put(rows(*range(8)), partition_id=part)
    seen: list[float] = []
    for _ in range(2):
        meta = client.get_meta(["x"], 4, part, task_name="train")
        data = client.get_data(meta)
        seen += numbers(data)
        doubled = TensorDict({"y": torch.tensor([[2 * n] for n in numbers(data)])}, batch_size=4)
        client.put(doubled, metadata=meta)
    assert sorted(seen) == [*range(8)]
    assert client.check_consumption_status("train", part)
    both = client.get_data(client.get_meta(["x", "y"], 8, part, task_name="other"))
    assert [float(y) for y in column(both, "y")] == [2 * x for x in numbers(both)]
    client.clear_partition(part)
    assert place.names() == []


def test_other_processes(place: Place) -> None:
    """A Ray worker that imports nothing of ours puts and gets through TransferQueue alone."""
    part = fresh("workers")

    def produce(number: int) -> None:
        import torch
        import transfer_queue  # type: ignore[import-not-found]

        transfer_queue.init()
        transfer_queue.kv_put(
            key=f"k{number}", partition_id=part, fields={"x": torch.tensor([float(number)])}
        )

    ray.get(
        [ray.remote(num_cpus=0, max_calls=1)(produce).remote(number) for number in range(3)],
        timeout=120,
    )
    assert numbers(tq.kv_batch_get(["k0", "k1", "k2"], part)) == [0, 1, 2]
    tq.kv_clear(keys=["k0", "k1", "k2"], partition_id=part)


@pytest.mark.parametrize("workers", [0, 1])
def test_streaming_loader(place: Place, workers: int) -> None:
    """The streaming loader yields every row once, in this process and in one of its own."""
    part = fresh("stream")
    conf = ray.get(ray.get_actor("TransferQueueController", "transfer_queue").get_config.remote())
    tq.get_client().put(rows(*range(12)), partition_id=part)
    dataset = tq.StreamingDataset(
        config=conf,
        batch_size=4,
        micro_batch_size=2,
        data_fields=["x"],
        partition_id=part,
        task_name="train",
        dp_rank=0,
        should_check_consumption_status=True,
    )
    context = {"multiprocessing_context": "spawn"} if workers else {}
    loader = tq.StreamingDataLoader(dataset, num_workers=workers, **context)
    batches = [numbers(data) for data, _ in loader]
    assert [len(batch) for batch in batches] == [2] * 6
    assert sorted(number for batch in batches for number in batch) == [*range(12)]
    tq.get_client().clear_partition(part)


@CHECKPOINTS
def test_checkpoint(place: Place, tmp_path: Path) -> None:
    """Saved, cleared and loaded, everything is there again; twice over, too."""
    part = fresh("saved")
    keys = ["a", "b", "c"]
    fields = rows(1, 2, 3)
    fields["o"] = NonTensorStack({"n": 1}, None, "x")
    for folder in (tmp_path / "first", tmp_path / "second"):
        tq.kv_batch_put(
            keys=keys, partition_id=part, fields=fields, tags=[{"t": n} for n in range(3)]
        )
        tq.save_checkpoint(folder, metadata={"step": 7})
        tq.kv_clear(keys=keys, partition_id=part)
        tq.load_checkpoint(folder)
        data = tq.kv_batch_get(keys=keys, partition_id=part)
        assert numbers(data) == [1, 2, 3]
        assert column(data, "o") == [{"n": 1}, None, "x"]
        assert tq.kv_list(part)[part]["c"] == {"t": 2}
    tq.kv_clear(keys=keys, partition_id=part)
