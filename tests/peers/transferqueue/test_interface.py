"""TransferQueue's public interface over our store, where its own storage is no measure.

`test_differential.py` shows that every call answers as with its own storage, whatever the value.
"""

import pytest

from peers.transferqueue.system import (
    PROTOTYPE,
    NonTensorData,
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


def test_one_object_for_all_rows(place: Place) -> None:
    """An object that stands for all rows is the value of each, also of one asked for twice."""
    part = fresh("same")
    fields = TensorDict({"s": NonTensorData("abc", batch_size=[3])}, batch_size=3)
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id=part, fields=fields)
    back = column(tq.kv_batch_get(keys=["c", "a", "b", "a"], partition_id=part), "s")
    assert back == ["abc"] * 4
    tq.kv_clear(keys=["a", "b", "c"], partition_id=part)


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


def test_streaming_loader(part: str) -> None:
    """The streaming loader yields every row once, in a process of its own."""
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
    loader = tq.StreamingDataLoader(dataset, num_workers=1, multiprocessing_context="spawn")
    batches = [numbers(data) for data, _ in loader]
    assert [len(batch) for batch in batches] == [2] * 6
    assert sorted(number for batch in batches for number in batch) == [*range(12)]
