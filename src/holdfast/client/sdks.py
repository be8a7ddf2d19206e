"""What the wrappers of other people's client libraries share."""

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from holdfast.client.target import Target
from holdfast.client.warmup import Probe
from holdfast.errors import MissingPackage, Mistake
from holdfast.loopthread import LoopThread
from holdfast.timeouts import DEFAULTS

__all__ = ["connector", "no_seam", "run_aside", "sdk"]


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


def connector(check: Callable[[], object], make: Callable[..., Any]) -> Callable[..., Any]:
    """The `connect` of a client library: `check` whether it fits, warm up, and `make` a client."""

    def connect(
        target: Target,
        *,
        warm_up_s: float | None = None,
        probe: Probe | None = None,
        **options: Any,
    ) -> Any:
        """Warm up (0 s: not; None: as the target says), and give a client with its `options`."""
        check()  # before anything is waited for
        if warm_up_s != 0:
            run_aside(target.warm_up(limit_s=warm_up_s, probe=probe).run())
        return make(target, **options)

    return connect


def run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Run something asynchronous from code that may or may not have an event loop.

    Whoever interrupts this (Ctrl-C) ends the work, too.
    """
    aside, ended = LoopThread("holdfast-warm-up"), threading.Event()

    async def main() -> None:
        try:
            await work
        finally:
            ended.set()

    try:
        aside.run(main())
    finally:
        ended.wait(DEFAULTS.ending_s)  # what was interrupted may still have something to close
        aside.stop()
