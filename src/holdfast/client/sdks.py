"""What the wrappers of other people's client libraries share."""

import asyncio
import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn

from holdfast.client.target import Target
from holdfast.client.warmup import Probe
from holdfast.errors import MissingPackage, Mistake
from holdfast.timeouts import DEFAULTS

__all__ = ["no_seam", "run_aside", "sdk", "warm_up"]


def sdk(module: str, package: str) -> Any:
    """Import a client library. Raises `MissingPackage` with its name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{package} is not installed, or not whole ({error}): pip install {package}"
        ) from error


def no_seam(package: str, tested: str, what: str) -> NoReturn:
    """Say that this version of a client library does not have what we hold on to."""
    version = importlib.metadata.version(package)
    raise Mistake(
        f"{package} {version} has no {what}: its requests cannot be verified, and a 404 would "
        f"be raised as it comes. Use the version that Holdfast is tested with ({tested}), or "
        "holdfast.client.native"
    )


def warm_up(target: Target, limit_s: float | None, probe: Probe | None) -> None:
    """Block until the data path is ready. 0 s: no warm-up; None: as the target says."""
    if limit_s != 0:
        run_aside(target.warm_up(limit_s=limit_s, probe=probe).run())


def run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Run something asynchronous from code that may or may not have an event loop.

    Whoever interrupts this (Ctrl-C) ends the work, too.
    """
    failure: list[BaseException] = []
    begun: Future[Callable[[], object]] = Future()

    async def main() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        await work

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 -- raised below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="holdfast-warm-up", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        with contextlib.suppress(RuntimeError, TimeoutError):  # it has ended by itself
            begun.result(DEFAULTS.ending_s)()
            thread.join(DEFAULTS.ending_s)
        raise
    if failure:
        raise failure[0]
