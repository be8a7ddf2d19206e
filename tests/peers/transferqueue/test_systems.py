"""TransferQueue started in other ways: other samplers, again, without room, without a head."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from holdfast.contrib.transferqueue import Settings
from holdfast.errors import BatchFailed, Corrupt, Mistake, NoRoom, Unavailable, UnknownOutcome
from holdfast.proc import HeldPort
from peers.transferqueue.system import (
    CHECKPOINTS,
    PROTOTYPE,
    Place,
    TensorDict,
    column,
    fresh,
    interface,
    numbers,
    ray,
    rows,
    running,
    tq,
)
from peers.transferqueue.system import place as new_place

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings(PROTOTYPE)]


@pytest.fixture
def empty(cluster: None, tmp_path: Path) -> Iterator[Place]:
    with new_place("shm", tmp_path) as found:
        yield found


def test_whole_groups(empty: Place) -> None:
    """GRPO's sampler gives whole groups of samples, with the values of exactly those."""
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=4)
    with running(empty.url, controller={"sampler": sampler}):
        client, part = tq.get_client(), fresh("groups")
        client.put(rows(*range(10)), partition_id=part)
        meta = client.get_meta(["x"], 8, part, task_name="train")
        assert numbers(client.get_data(meta)) == [*range(8)]


def test_ranks(empty: Place) -> None:
    """All ranks of one group get the same rows; another group gets others."""
    with running(empty.url, controller={"sampler": "RankAwareSampler", "polling_mode": True}):
        client, part = tq.get_client(), fresh("ranks")
        client.put(rows(*range(8)), partition_id=part)

        def batch(group: int) -> list[float]:
            how = {"dp_rank": group, "batch_index": 0, "task_name": "t", "partition_id": part}
            meta = client.get_meta(["x"], 4, part, task_name="t", sampling_config=how)
            return numbers(client.get_data(meta))

        assert batch(0) == batch(0)
        assert sorted(batch(0) + batch(1)) == [*range(8)]


def test_balanced_by_length(empty: Place) -> None:
    """The sampler that balances lengths works with nested tensors that lie in our store."""
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    with running(empty.url, controller={"sampler": sampler}):
        client, part = tq.get_client(), fresh("lengths")
        lengths = [1, 2, 3, 4, 50, 51, 52, 53]
        ids = torch.nested.as_nested_tensor(
            [torch.full((n,), n) for n in lengths], layout=torch.jagged
        )
        client.put(TensorDict({"input_ids": ids}, batch_size=8), partition_id=part)
        seen = []
        for rank in range(2):
            how = {"dp_rank": rank, "batch_index": 0, "task_name": "t", "partition_id": part}
            meta = client.get_meta(["input_ids"], 4, part, task_name="t", sampling_config=how)
            seen += [len(row) for row in column(client.get_data(meta), "input_ids")]
        assert sorted(seen) == lengths


@CHECKPOINTS
def test_a_checkpoint_outlives_the_system(empty: Place, tmp_path: Path) -> None:
    """Loaded into a new TransferQueue, a checkpoint is whole; a damaged one loads nothing."""
    part = fresh("resumed")
    with running(empty.url):
        tq.kv_batch_put(keys=["a", "b"], partition_id=part, fields=rows(1, 2, width=100))
        tq.save_checkpoint(tmp_path / "saved")
    assert empty.names() == []
    frames = tmp_path / "saved" / "holdfast.frames"
    whole = frames.read_bytes()
    with running(empty.url):
        for damaged in (whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
            frames.write_bytes(damaged)
            with pytest.raises(Corrupt):
                tq.load_checkpoint(tmp_path / "saved")
            assert empty.names() == []
        frames.write_bytes(whole)
        tq.load_checkpoint(tmp_path / "saved")
        assert numbers(tq.kv_batch_get(["a", "b"], part)) == [1, 2]
        tq.save_checkpoint(tmp_path / "again")
    assert empty.names() == [], "what was adopted stays behind"
    with running(empty.url):
        tq.load_checkpoint(tmp_path / "again")
        assert numbers(tq.kv_batch_get(["a", "b"], part)) == [1, 2]


def test_a_crashed_run_leaves_values_until_reset(empty: Place) -> None:
    """What a killed system left does not disturb the next one, and `reset` deletes it."""
    with running(empty.url):
        tq.kv_put(key="a", partition_id="p", fields={"x": torch.ones(1)})
        manager: Any = tq.get_client().storage_manager
        manager.storage_client.settings = manager.storage_client.settings.model_copy(
            update={"run": "tq-0"}
        )  # as if it had died: it does not know its run any more
    assert len(empty.names()) == 1
    with running(empty.url):
        assert tq.kv_list() == {}
        assert len(empty.names()) == 1
    with running(empty.url, reset=True):
        assert empty.names() == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "url"),
    ({"url": "memory:x"}, "inside one process"),
    ({"url": "shm://x", "colour": "red"}, "colour"),
    ({"url": "shm://x", "attempts": 0}, "attempts"),
]


@pytest.mark.parametrize(("section", "said"), WRONG)
def test_wrong_settings(section: dict[str, Any], said: str) -> None:
    """A wrong configuration is refused, by name."""
    with pytest.raises(Mistake, match=said):
        Settings.read(section)


def test_a_store_that_is_not_there(cluster: None) -> None:
    """tq.init fails when the store cannot be used, before anybody relies on it."""
    with (
        HeldPort() as port,
        pytest.raises(BatchFailed, match="probe"),
        running(f"redis://127.0.0.1:{port}?timeout=1"),
    ):
        pytest.fail("it has started")


@pytest.fixture
def small(cluster: None, tmp_path: Path) -> Iterator[Place]:
    """A system of its own, with little room."""
    with new_place("shm", tmp_path, budget="32M") as found, running(found.url):
        yield found


def test_no_room(small: Place) -> None:
    """A put that does not fit fails as a whole, and what was there stays whole."""
    tq.kv_put(key="a", partition_id="p", fields={"x": torch.ones(1000)})
    big = TensorDict({"x": torch.zeros(4, 4 << 20)}, batch_size=4)  # 64 MiB
    with pytest.raises(BatchFailed) as caught:
        tq.kv_batch_put(keys=list("bcde"), partition_id="p", fields=big)
    assert any(isinstance(why, NoRoom) for why in caught.value.failures.values())
    assert len(small.names()) == 1
    assert numbers(tq.kv_batch_get(keys="a", partition_id="p")) == [1]
    tq.kv_put(key="f", partition_id="p", fields={"x": torch.ones(1 << 20)})
    assert numbers(tq.kv_batch_get(keys="f", partition_id="p")) == [1]


def test_the_controller_is_dead(small: Place) -> None:
    """With TransferQueue's controller dead, nothing hangs and no put claims to be published."""
    client = tq.get_client()
    tq.kv_put(key="a", partition_id="p", fields={"x": torch.ones(2)})
    known = client.kv_retrieve_meta(keys=["a"], partition_id="p")
    meta = client.get_meta(["x"], 2, "p", mode="insert")
    controller = interface._TQ_CONTROLLER
    process = psutil.Process(ray.get(controller.__ray_call__.remote(lambda _: os.getpid())))
    ray.kill(controller)
    process.wait(timeout=30)
    assert numbers(client.get_data(known)) == [1], "metadata and store are enough for a get"
    with pytest.raises(UnknownOutcome, match="did not say that it has published"):
        client.put(rows(1, 2), metadata=meta)
    with pytest.raises((RuntimeError, Unavailable), match="it is dead"):
        tq.kv_batch_get(keys="a", partition_id="p")
    with pytest.raises((RuntimeError, Unavailable), match="it is dead"):
        tq.kv_put(key="b", partition_id="p", fields={"x": torch.ones(2)})


SCRIPT = """
import sys
import ray

ray.init(
    num_cpus=4, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False,
    runtime_env={"worker_process_setup_hook": "holdfast.contrib.transferqueue.register"},
)

@ray.remote(num_cpus=0)
def trainer(url):
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    conf = {"storage_backend": "Holdfast", "Holdfast": {"url": url}}
    tq.init(OmegaConf.create({"backend": conf}))
    tq.kv_put(key="a", partition_id="p", fields={"x": torch.tensor([1.0])})
    value = tq.kv_batch_get(keys="a", partition_id="p")["x"].unbind()[0].item()
    kind = type(tq.get_client().storage_manager).__name__
    tq.close()
    return kind, value

print(ray.get(trainer.remote(sys.argv[1]), timeout=120))
assert not any(name.startswith("holdfast") for name in sys.modules)
ray.shutdown()
"""


def test_by_configuration_alone(empty: Place) -> None:
    """A setup hook of Ray's is enough: no line of the program's own names us."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, empty.url], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "('HoldfastStorageManager', 1.0)"
    assert empty.names() == []


def test_the_old_name_of_the_back_end_is_the_same_back_end() -> None:
    """Configurations of verl, and pickles, may have it."""
    old = importlib.import_module("holdfast.transfer.transferqueue")
    assert old.Settings is Settings
    assert importlib.import_module("holdfast.transfer.transferqueue.bootstrap").Registration
