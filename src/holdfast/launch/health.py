"""Is this node fit? Small checks, run before it joins and now and then after.

A check is a function that returns None, or in words what is wrong. An unhealthy node withdraws
and says why; it is never a verdict about the run. Further checks come from entry points of the
group `holdfast.health` (name = check, value = a function without arguments); one that cannot be
imported, raises or takes too long is unhealthy too, because a check that cannot be made is no
good news.

A check runs in a thread that nobody waits for: one that hangs, as on a dead network file system,
keeps neither the node nor its process from ending.
"""

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS

__all__ = ["Check", "built_in", "examine", "load"]

Check = Callable[[], str | None]

_GROUP = "holdfast.health"


def disk(folder: Path, least_bytes: int) -> str | None:
    """Room for logs and checkpoints, and the right to use it."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a file system that is read-only"
    free = shutil.disk_usage(folder).free
    if free >= least_bytes:
        return None
    return f"{folder} has {free >> 20} MiB left, {least_bytes >> 20} MiB are needed"


def memory(least_bytes: int) -> str | None:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and (available := int(rest.split()[0]) << 10) < least_bytes:
            return f"{available >> 20} MiB of memory left, {least_bytes >> 20} are needed"
    return None


def network(address: str) -> str | None:
    """Whether others could reach us at the address that we give them."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.bind((address, 0))
    except OSError as error:
        return f"cannot listen on {address}: {error.strerror or error}"
    return None


def gpus() -> str | None:
    """Every GPU answers, where there are any and NVML is installed."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not Path("/dev/nvidiactl").exists():
            return None  # no driver: a machine without GPUs
        return f"the driver does not answer: {error}"
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:
                return f"GPU {index}: {error}"
    finally:
        pynvml.nvmlShutdown()
    return None


def built_in(address: str, folder: Path) -> dict[str, Check]:
    """The checks that every node makes. Limits: HOLDFAST_LEAST_{DISK,MEMORY}_MIB."""
    least_disk = _mebibytes("HOLDFAST_LEAST_DISK_MIB")
    least_memory = _mebibytes("HOLDFAST_LEAST_MEMORY_MIB")
    return {
        "disk": lambda: disk(folder, least_disk),
        "memory": lambda: memory(least_memory),
        "network": lambda: network(address),
        "gpu": gpus,
    }


def _mebibytes(variable: str) -> int:
    text = os.environ.get(variable) or "64"
    if not text.isdecimal():
        raise Mistake(f"{variable} is a number of MiB, not {text!r}")
    return int(text) << 20


def load() -> dict[str, Check]:
    """Checks of other packages. None replaces another of the same name."""
    found: dict[str, Check] = {}
    for point in entry_points(group=_GROUP):
        name = point.name if point.name not in found else f"{point.name} ({point.value})"
        found[name] = _imported(point)
    return found


def _imported(point: EntryPoint) -> Check:
    """A check that is imported when it is made, so that a broken one is like one that raises."""
    return lambda: point.load()()


async def examine(
    checks: Mapping[str, Check], limit_s: float = DEFAULTS.health_check_s
) -> str | None:
    """Make every check, each in a thread of its own; returns what is wrong, or None."""
    names = list(checks)
    found = await asyncio.gather(*(_one(name, checks[name], limit_s) for name in names))
    return "; ".join(wrong for wrong in found if wrong) or None


async def _one(name: str, check: Check, limit_s: float) -> str | None:
    try:
        async with asyncio.timeout(limit_s):
            wrong = await _in_thread(name, check)
    except TimeoutError:
        wrong = f"no answer within {limit_s:g} s"
    return f"{name}: {wrong}" if wrong else None


def _in_thread(name: str, check: Check) -> "asyncio.Future[str | None]":
    """A daemon thread: those of an executor are waited for when the process ends."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def tell(wrong: str | None) -> None:
        if not answer.done():
            answer.set_result(wrong)

    def work() -> None:
        try:
            wrong = check()
        except BaseException as error:  # noqa: BLE001 -- the boundary to somebody else's check
            wrong = f"{type(error).__name__}: {error}"
        try:
            loop.call_soon_threadsafe(tell, wrong)
        except RuntimeError:
            return  # the loop was closed before we were done: nobody asks any more

    threading.Thread(target=work, name=f"check {name}", daemon=True).start()
    return answer
