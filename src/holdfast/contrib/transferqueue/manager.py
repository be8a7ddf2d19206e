"""The storage manager: publishes what was put, and gets exactly what was published.

On top of TransferQueue's manager for key-value stores:

- A put that the controller did not acknowledge raises. (TransferQueue logs it, and the put
  "succeeds" although nobody will ever see the values.)
- A put of a field that had a value deletes that value once the new one is published.
- Waiting for the store never blocks the client's event loop.
- The process that called `tq.init` first deletes the run's values when it closes.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import zmq  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]
from transfer_queue.storage.managers.base import (  # type: ignore[import-not-found]
    TQ_DATA_UPDATE_RESPONSE_TIMEOUT,
    KVStorageManager,
)
from transfer_queue.utils.zmq_utils import (  # type: ignore[import-not-found]
    ZMQMessage,
    ZMQRequestType,
    create_zmq_socket,
)

from holdfast.contrib.transferqueue import checkpoint, columns
from holdfast.contrib.transferqueue.client import HoldfastStorageClient
from holdfast.contrib.transferqueue.guards import check_missing, while_alive
from holdfast.contrib.transferqueue.settings import Settings
from holdfast.contrib.transferqueue.tokens import from_token
from holdfast.errors import HoldfastError, Mistake, Unavailable, UnknownOutcome

__all__ = ["CLIENT", "HoldfastStorageManager", "NotPublished", "own"]

CLIENT = "HoldfastStorageClient"

_own_runs: set[str] = set()
"""The runs that this process has started, and deletes when it closes."""


def own(run: str) -> None:
    """Note that this process has started the run."""
    _own_runs.add(run)


class NotPublished(Mistake):
    """The controller has refused to publish a put. Nothing of it is left."""


class HoldfastStorageManager(KVStorageManager):  # type: ignore[misc]
    """TransferQueue's data in a store of ours."""

    storage_client: HoldfastStorageClient

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        del zmq_context  # borrowed by TransferQueue's own storage; before 0.1.10 there is none
        settings = Settings.read(config)
        super().__init__(controller_info, {**settings.model_dump(), "client_name": CLIENT})

    # Put

    async def put_data(
        self,
        data: TensorDict,
        metadata: Any,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> None:
        """Store all values, publish them, and delete those whose place they took."""
        kept: list[dict[str, Any]] = metadata._custom_backend_meta
        before = [dict(tokens) for tokens in kept]
        try:
            await super().put_data(data, metadata, data_parser)
        except NotPublished:  # nobody will ever ask for the new ones
            new, kept[:] = [dict(tokens) for tokens in kept], before
            await self._forget(data, metadata, new)
            raise
        await self._forget(data, metadata, before)

    async def _forget(self, data: TensorDict, metadata: Any, rows: list[dict[str, Any]]) -> None:
        refs = [
            from_token(f"{index}@{field}", row[field])
            for index, row in zip(metadata.global_indexes, rows, strict=True)
            for field in data.keys()  # noqa: SIM118 -- iterating a TensorDict goes by rows
            if row.get(field) is not None
        ]
        if refs:
            await asyncio.to_thread(self.storage_client.forget, refs)

    @staticmethod
    def _generate_values(data: TensorDict) -> list[Any]:
        return columns.values(data)

    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """Publish: tell the controller, and wait until it says that it knows.

        Runs in the event loop of TransferQueue's notifying thread.
        """
        limit_s = float(TQ_DATA_UPDATE_RESPONSE_TIMEOUT)
        async with self._controller_socket() as socket:
            answer = while_alive(self.controller_info, _exchange(socket, request_msg))
            try:
                body = await asyncio.wait_for(answer, limit_s)
            except (TimeoutError, Unavailable) as error:
                raise UnknownOutcome(
                    "the values are stored, but TransferQueue's controller did not say that it "
                    f"has published them ({error!r} within {limit_s:g} s)"
                ) from error
        if not body.get("success"):
            raise NotPublished(
                "TransferQueue's controller has not published the values: partition "
                f"{body.get('partition_id')} was cleared, or a field has another dtype than "
                "before. Its log says more"
            )

    @contextlib.asynccontextmanager
    async def _controller_socket(self) -> AsyncIterator[Any]:
        """A socket to the controller: one of the pool, or before 0.1.11 one of our own."""
        if hasattr(self, "notify_pool"):
            async with self.notify_pool.alease(self.controller_info) as socket:
                yield socket
            return
        identity = f"{self.storage_manager_id}-notify-{uuid.uuid4().hex[:8]}".encode()
        place = self.controller_info
        socket = create_zmq_socket(self.zmq_context, zmq.DEALER, place.ip, identity=identity)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(place.to_addr("request_handle_socket"))
            yield socket
        finally:
            socket.close(linger=0)

    # Get and clear

    async def get_data(self, metadata: Any) -> TensorDict:
        """Exactly the values that the metadata speaks of."""
        check_missing(metadata)
        if not metadata.field_names:
            return TensorDict({}, batch_size=len(metadata))
        keys, tokens = self._keys_and_tokens(metadata)
        values = await asyncio.to_thread(self.storage_client.get, keys, custom_backend_meta=tokens)
        return self._merge_tensors_to_tensordict(metadata, values)

    async def clear_data(self, metadata: Any) -> None:
        """Delete exactly the values that the metadata speaks of."""
        keys, tokens = self._keys_and_tokens(metadata)
        await asyncio.to_thread(self.storage_client.clear, keys, tokens)

    def _keys_and_tokens(self, metadata: Any) -> tuple[list[str], list[Any]]:
        fields = sorted(metadata.field_names)
        tokens = [row.get(field) for field in fields for row in metadata._custom_backend_meta]
        return self._generate_keys(fields, metadata.global_indexes), tokens

    # Checkpoints

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all values of this run, proven, into the folder."""
        await asyncio.to_thread(checkpoint.save, self.storage_client, Path(checkpoint_dir))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Put saved values back, as they were; the controller's saved state refers to them."""
        await asyncio.to_thread(checkpoint.load, self.storage_client, Path(checkpoint_dir))

    def close(self) -> None:
        """Stop; whoever started the run deletes its values. Twice does no harm."""
        super().close()
        client: HoldfastStorageClient | None = self.__dict__.pop("storage_client", None)
        if client is None:
            return
        run = client.settings.run
        if run in _own_runs:
            _own_runs.discard(run)
            # Whatever stays is told by `holdfast transfer ls`, and `reset` deletes it.
            with contextlib.suppress(HoldfastError):
                for one in (*checkpoint.adopted(client), run):
                    client.sweep(f"{one}/")
        client.close()


async def _exchange(socket: Any, request: list[Any]) -> dict[str, Any]:
    """Send a message and wait for the controller's acknowledgement of it."""
    await socket.send_multipart(request)
    while True:
        answer = ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
        if answer.request_type == ZMQRequestType.NOTIFY_DATA_UPDATE_ACK:
            body: dict[str, Any] = answer.body
            return body
