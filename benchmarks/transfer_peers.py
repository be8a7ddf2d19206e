"""The contenders of `transfer.py` that are other people's systems. They run in `.venv-peers`.

`.venv-peers/bin/python -m benchmarks.transfer_peers KIND SOURCE LOG JSON`; see
`transfer_work.py`. The kind "head" starts Ray and does nothing more; it tells the others where.

The peers are met where they are quickest: TransferQueue takes all rows as one tensor and gives
them as one; its get begins with the metadata at hand. Ray is given numpy arrays, which it maps
and does not copy.
"""

import base64
import importlib
from typing import Any

from benchmarks.transfer_work import Contender, Task, serve

# Not installed where the types are checked.
ray: Any = importlib.import_module("ray")
HERE = "127.0.0.1"
STORE_BYTES = 3 << 30
FIELD = "x"


class Head(Contender):
    """A Ray of our own, on loopback. It ends with this process."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        made = ray.init(
            num_cpus=4,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=HERE,
            _temp_dir=how["folder"],
        )
        self.about = {"address": made.address_info["gcs_address"]}

    def put(self, task: Task) -> Any:
        raise AssertionError("it hosts those who put, and puts nothing itself")

    def get(self, task: Task, ready: Any) -> Any:
        raise AssertionError("it hosts those who get, and gets nothing itself")


class Ray(Contender):
    """`ray.put` for each value, one `ray.get` for all."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        _join(how)
        self.refs: list[Any] = []

    def put(self, task: Task) -> Any:
        self.refs = [ray.put(row) for row in task.values.numpy()]
        return self.refs

    def tell(self, put: Any) -> Any:
        return base64.b64encode(ray.cloudpickle.dumps(put)).decode()

    def prepare(self, task: Task, told: Any) -> Any:
        return ray.cloudpickle.loads(base64.b64decode(told))

    def get(self, task: Task, ready: Any) -> Any:
        return ray.get(ready)

    def clear(self, task: Task) -> None:
        self.refs = []


class TransferQueue(Contender):
    """`put` of one tensor with a row per sample; `get_data` of metadata."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        self._tensordict: Any = importlib.import_module("tensordict")
        tq: Any = importlib.import_module("transfer_queue")
        conf: Any = importlib.import_module("omegaconf").OmegaConf.create(
            {"backend": how["backend"]}
        )
        _join(how)
        tq.init(conf)
        self.client = tq.get_client()

    def _part(self, task: Task) -> str:
        return task.keys[0].rpartition("/")[0]

    def put(self, task: Task) -> Any:
        data = self._tensordict.TensorDict({FIELD: task.values}, batch_size=len(task.keys))
        self.client.put(data, partition_id=self._part(task))

    def prepare(self, task: Task, told: Any) -> Any:
        return self.client.get_meta([FIELD], len(task.keys), self._part(task), task_name="bench")

    def get(self, task: Task, ready: Any) -> Any:
        return self.client.get_data(ready)[FIELD]

    def rows(self, found: Any) -> Any:
        # Metadata has its own order. Each row begins with a number that only it has.
        return sorted(found.unbind(), key=lambda row: int(row[0]))

    def clear(self, task: Task) -> None:
        self.client.clear_partition(self._part(task))


def _join(how: dict[str, Any]) -> None:
    ray.init(address=how["address"], log_to_driver=False, _node_ip_address=HERE)


KINDS: dict[str, type[Contender]] = {"head": Head, "ray": Ray, "transferqueue": TransferQueue}

if __name__ == "__main__":
    serve(KINDS)
