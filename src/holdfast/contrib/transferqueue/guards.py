"""Guards around TransferQueue's own client, where a fault passes before storage is asked.

**Missing keys.** Asked for keys of which some do not exist, the controller leaves those out
and says nothing. Here the metadata remembers them, and `get_data` of our manager raises.

**A dead controller.** TransferQueue waits for an answer without a limit. Here the controller's
port is tried while the answer is awaited; when nobody listens there, the call fails. (An
answer that takes long is waited for: `get_meta` does so by design.)

Both apply only to clients whose storage is ours; others go straight through.

Since 0.1.10 every request passes one method of the client. Before, each method has a socket of
its own, which a decorator gives it as `socket`: there all of these are guarded.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from transfer_queue.client import (  # type: ignore[import-not-found]
    AsyncTransferQueueClient,
)

from holdfast.errors import BatchFailed, NotFound, Unavailable
from holdfast.timeouts import DEFAULTS

__all__ = ["check_missing", "install", "while_alive"]

T = TypeVar("T")

_TRIES = 3
_MISSING = "holdfast_missing_keys"
_PORT = "request_handle_socket"


def install(ours: type) -> None:
    """Guard all clients whose storage manager is one of `ours`. Twice does no harm."""
    for method in _requests():
        _wrap(method, functools.partial(_watch_controller, ours))
    _wrap("async_kv_retrieve_meta", functools.partial(_remember_missing, ours))


def _requests() -> list[str]:
    """The methods that wait for an answer of the controller."""
    if hasattr(AsyncTransferQueueClient, "_request_controller"):
        return ["_request_controller"]
    return [
        name
        for name, method in inspect.getmembers(AsyncTransferQueueClient, inspect.isfunction)
        if "socket" in inspect.signature(method).parameters
    ]


def check_missing(metadata: Any) -> None:
    """Refuse metadata of fewer keys than were asked for."""
    missing = metadata.extra_info.get(_MISSING)
    if missing:
        raise BatchFailed(
            f"{len(missing)} of {len(missing) + len(metadata)} keys are not there: "
            f"{', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}",
            failures={key: NotFound(f"{key}: no such key", key=key) for key in missing},
        )


async def while_alive(controller: Any, answer: Awaitable[T]) -> T:
    """Await an answer as long as somebody listens at the controller's port."""
    task = asyncio.ensure_future(answer)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=DEFAULTS.controller_check_s)
            if done:
                return task.result()
            if not await _listening(controller) and not task.done():
                _hang_up(answer)
                raise Unavailable(
                    f"TransferQueue's controller {controller.id} does not answer, and nobody "
                    "listens at its port: it is dead. What it knew is lost with it"
                )
    finally:
        task.cancel()


def _hang_up(answer: Any) -> None:
    """Close the socket of a request that will never be sent.

    Before 0.1.10 a request has a socket in its outermost frame, and when it is cancelled waits
    for ever, in the event loop, until that is sent.
    """
    frame = getattr(answer, "cr_frame", None)
    socket = frame.f_locals.get("sock") if frame is not None else None
    if socket is not None:
        socket.close(linger=0)


async def _listening(controller: Any) -> bool:
    place = urlsplit(controller.to_addr(_PORT))
    for _ in range(_TRIES):
        try:
            opening = asyncio.open_connection(place.hostname, place.port)
            _, writer = await asyncio.wait_for(opening, DEFAULTS.store_call_s)
        except ConnectionRefusedError:
            continue
        except (OSError, TimeoutError):
            await asyncio.sleep(DEFAULTS.controller_check_s)
            continue
        writer.close()
        return True
    return False


async def _remember_missing(
    ours: type,
    original: Callable[..., Awaitable[Any]],
    client: Any,
    keys: Any,
    partition_id: str,
    create: bool = False,
    **more: Any,
) -> Any:
    metadata = await original(client, keys, partition_id, create=create, **more)
    asked = [keys] if isinstance(keys, str) else list(keys)
    is_ours = isinstance(getattr(client, "storage_manager", None), ours)
    if is_ours and not create and 0 < len(metadata) < len(asked):
        found = await client.async_kv_retrieve_keys(metadata.global_indexes, partition_id)
        metadata.set_extra_info(_MISSING, [key for key in asked if key not in set(found)])
    return metadata


async def _watch_controller(
    ours: type, original: Callable[..., Awaitable[Any]], client: Any, *args: Any, **named: Any
) -> Any:
    answer = original(client, *args, **named)
    if not isinstance(getattr(client, "storage_manager", None), ours):
        return await answer
    return await while_alive(client._controller, answer)


def _wrap(method: str, guard: "functools.partial[Any]") -> None:
    original = getattr(AsyncTransferQueueClient, method)
    kind = guard.func.__name__
    before: tuple[str, ...] = getattr(original, "holdfast_guards", ())
    if kind in before:
        return

    @functools.wraps(original)
    async def guarded(self: Any, *args: Any, **named: Any) -> Any:
        return await guard(original, self, *args, **named)

    guarded.holdfast_guards = (*before, kind)  # type: ignore[attr-defined]
    setattr(AsyncTransferQueueClient, method, guarded)
