"""Faults of the store under a running TransferQueue: each is an error that names the keys."""

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from holdfast.errors import BatchFailed, Mistake
from peers.transferqueue.system import (
    PROTOTYPE,
    Place,
    TensorDict,
    flipped,
    fresh,
    numbers,
    ray,
    reasons,
    rows,
    tq,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings(PROTOTYPE)]


@contextlib.contextmanager
def fails(*words: str, only: str | None = None) -> Iterator[None]:
    """A batch fails, for reasons among these words; if that is said, `only` for this key."""
    with pytest.raises(BatchFailed) as caught:
        yield
    found = reasons(caught.value)
    assert found
    assert set(found.values()) <= set(words)
    assert only is None or list(found) == [only]


def two(part: str) -> tuple[bytes, str]:
    """Put the keys a and b; the bytes of b, and TransferQueue's own name for it."""
    payload = os.urandom(256)
    column = torch.stack(
        [torch.zeros(256), torch.frombuffer(bytearray(payload), dtype=torch.uint8)]
    )
    fields = TensorDict({"x": column.to(torch.uint8)}, batch_size=2)
    tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=fields)
    (number,) = tq.get_client().kv_retrieve_meta(keys=["b"], partition_id=part).global_indexes
    return payload, f"{number}@x"


def test_a_missing_key_is_named(place: Place) -> None:
    """A key that does not exist fails the batch by name; clearing it is no error."""
    part = fresh("missing")
    two(part)
    if tq.__version__ == "0.1.8":  # there TransferQueue itself refuses the whole batch
        with pytest.raises(ValueError, match="were not found"):
            tq.kv_batch_get(keys=["a", "nobody", "b"], partition_id=part)
        tq.kv_clear(keys=["a", "b"], partition_id=part)
        return
    with pytest.raises(BatchFailed, match="nobody") as caught:
        tq.kv_batch_get(keys=["a", "nobody", "b"], partition_id=part)
    assert reasons(caught.value) == {"nobody": "missing"}
    tq.kv_clear(keys=["a", "nobody", "b"], partition_id=part)
    assert place.names() == []


def test_a_value_deleted_behind_its_back(place: Place, part: str) -> None:
    """A value that the store has lost is named, and the others arrive with the error."""
    _, name = two(part)
    place.delete(f"/{name}/")
    with pytest.raises(BatchFailed) as caught:
        tq.kv_batch_get(keys=["a", "b"], partition_id=part)
    assert reasons(caught.value) == {name: "stale"}
    assert len(caught.value.values) == 1


def test_a_flipped_bit(place: Place, part: str) -> None:
    """A value with one other bit is damaged, not a value."""
    payload, name = two(part)
    place.change(payload, flipped(payload))
    with fails("corrupt", only=name):
        tq.kv_batch_get(keys=["a", "b"], partition_id=part)


@pytest.mark.parametrize("left", [0, 1, 100, -1], ids=lambda left: f"to-{left}")
def test_a_cut_value(place: Place, part: str, left: int) -> None:
    """A value that is shorter than it was is damaged; one of no bytes is not None."""
    if place.server is None:
        pytest.skip("shared memory has no short reads")
    payload, name = two(part)
    place.change(payload, lambda data: data[:left])
    with fails("corrupt", "stale", only=name):
        tq.kv_batch_get(keys=["a", "b"], partition_id=part)


def test_metadata_of_a_cleared_partition(place: Place) -> None:
    """Old metadata is stale, although its indices belong to other samples now; it harms none."""
    old, new, client = fresh("old"), fresh("new"), tq.get_client()
    tq.kv_batch_put(keys=["a", "b"], partition_id=old, fields=rows(1, 2))
    stale = client.kv_retrieve_meta(keys=["a", "b"], partition_id=old)
    client.clear_partition(old)
    tq.kv_batch_put(keys=["c", "d"], partition_id=new, fields=rows(3, 4))
    fresher = client.kv_retrieve_meta(keys=["c", "d"], partition_id=new)
    assert fresher.global_indexes == stale.global_indexes, "the case does not arise any more"

    with fails("stale"):
        client.get_data(stale)
    if tq.__version__ != "0.1.8":  # whose controller ends its only thread over it
        client.clear_samples(stale)
    before = place.names()
    with pytest.raises(Mistake, match=f"partition {old} was cleared"):
        client.put(rows(5, 6), metadata=stale)
    assert place.names() == before, "a refused put has left values"
    assert numbers(tq.kv_batch_get(keys=["c", "d"], partition_id=new)) == [3, 4]
    client.clear_partition(new)


def test_replaced_values(place: Place) -> None:
    """Metadata from before an update does not silently mean the new value."""
    part, client = fresh("replaced"), tq.get_client()
    tq.kv_put(key="a", partition_id=part, fields={"x": torch.ones(2)})
    stale = client.kv_retrieve_meta(keys=["a"], partition_id=part)
    tq.kv_put(key="a", partition_id=part, fields={"x": torch.zeros(2)})
    with fails("stale"):
        client.get_data(stale)
    tq.kv_clear(keys="a", partition_id=part)
    assert place.names() == []


def test_what_was_never_put(part: str) -> None:
    """Metadata of samples that have no values yet gives an error, not fewer rows."""
    client = tq.get_client()
    meta = client.get_meta(["x"], 2, part, mode="insert")
    with fails("missing"):
        client.get_data(meta)
    client.put(rows(1, 2), metadata=meta)
    assert numbers(client.get_data(meta)) == [1, 2]


def test_another_dtype(place: Place, part: str) -> None:
    """A put that the controller refuses fails, and leaves nothing behind."""
    tq.kv_put(key="a", partition_id=part, fields={"x": torch.ones(2)})
    with pytest.raises(Mistake, match="another dtype"):
        tq.kv_put(key="b", partition_id=part, fields={"x": torch.ones(2, dtype=torch.int64)})
    assert len(place.names()) == 1
    assert numbers(tq.kv_batch_get(keys="a", partition_id=part)) == [1]


def test_the_store_is_killed(place: Place, part: str) -> None:
    """With the store dead, get and put fail by name; once it is back, both work as before."""
    if place.server is None:
        pytest.skip("shared memory has no server")
    tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(1, 2))
    place.server.kill()
    with pytest.raises(BatchFailed) as caught:
        tq.kv_batch_get(keys=["a", "b"], partition_id=part)
    assert list(reasons(caught.value).values()) == ["failed", "failed"]
    with pytest.raises(BatchFailed):
        tq.kv_put(key="c", partition_id=part, fields={"x": torch.ones(2)})
    place.server.restart()
    assert numbers(tq.kv_batch_get(keys=["a", "b"], partition_id=part)) == [1, 2]
    with pytest.raises(ValueError, match=r"not ready|not found"):
        tq.kv_batch_get(keys="c", partition_id=part, select_fields="x")
    tq.kv_put(key="c", partition_id=part, fields={"x": torch.ones(2)})
    assert numbers(tq.kv_batch_get(keys=["a", "c"], partition_id=part)) == [1, 1]


def test_the_store_is_away_for_a_moment(place: Place, part: str) -> None:
    """A store that comes back in time is a delay, not an error."""
    if place.server is None:
        pytest.skip("shared memory has no server")
    tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(1, 2))
    place.server.pause()
    back = threading.Timer(0.5, place.server.resume)
    back.start()
    assert numbers(tq.kv_batch_get(keys=["a", "b"], partition_id=part)) == [1, 2]
    back.join()


def test_a_killed_producer(place: Place, part: str) -> None:
    """What a worker has put outlives it, however it dies."""

    def produce() -> None:
        import os
        import signal

        import torch
        import transfer_queue  # type: ignore[import-not-found]

        transfer_queue.init()
        transfer_queue.kv_put(key="a", partition_id=part, fields={"x": torch.ones(1000)})
        os.kill(os.getpid(), signal.SIGKILL)

    task = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(produce)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(task.remote(), timeout=120)
    assert numbers(tq.kv_batch_get(keys="a", partition_id=part)) == [1]


def test_errors_cross_processes(place: Place, part: str) -> None:
    """An error in a Ray worker arrives as what it is, with its keys."""
    _, lost = two(part)

    def consume() -> None:
        import transfer_queue

        transfer_queue.init()
        transfer_queue.kv_batch_get(keys=["a", "b"], partition_id=part)

    place.delete(f"/{lost}/")
    with pytest.raises(BatchFailed) as caught:
        ray.get(ray.remote(num_cpus=0, max_calls=1)(consume).remote(), timeout=120)
    assert list(caught.value.failures) == [lost]
