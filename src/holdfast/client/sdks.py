"""What the wrappers of other people's client libraries share."""

import asyncio
import importlib
import importlib.metadata
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn

from holdfast.errors import MissingPackage, Mistake

__all__ = ["no_seam", "run_aside", "sdk"]


def sdk(module: str, package: str) -> Any:
    """Import a client library. Raises `MissingPackage` with its name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{package} is not installed, or not whole ({error}): pip install {package}"
        ) from error


def no_seam(package: str, what: str) -> NoReturn:
    """Say that this version of a client library does not have what we hold on to."""
    version = importlib.metadata.version(package)
    raise Mistake(
        f"{package} {version} has no {what}: its requests cannot be verified, and a 404 would "
        "be raised as it comes. Use a version that Holdfast was tested with (README), or "
        "holdfast.client.native"
    )


def run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Run something asynchronous from code that may or may not have an event loop."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 -- raised below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="holdfast-warm-up", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
