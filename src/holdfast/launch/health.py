"""Is this node fit? Small checks, run before it joins and now and then after.

A check is a function that returns None, or in words what is wrong. An unhealthy node withdraws
and says why; it is never a verdict about the run. Further checks come from entry points of the
group `holdfast.health` (name = check, value = a function without arguments); one that raises or
takes too long is unhealthy too, because a check that cannot be made is no good news.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["Check", "built_in", "examine", "load"]

Check = Callable[[], str | None]

_LIMIT_S = 20.0


def disk(folder: Path, least_bytes: int) -> str | None:
    """Room for logs and checkpoints."""
    free = shutil.disk_usage(folder).free
    if free >= least_bytes:
        return None
    return f"{folder} has {free >> 20} MiB left, {least_bytes >> 20} MiB are needed"


def memory(least_bytes: int) -> str | None:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            available = int(rest.split()[0]) << 10
            if available < least_bytes:
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
    except pynvml.NVMLError:
        return None  # no driver: a machine without GPUs
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                pynvml.nvmlDeviceGetMemoryInfo(handle)
            except pynvml.NVMLError as error:
                return f"GPU {index}: {error}"
    finally:
        pynvml.nvmlShutdown()
    return None


def built_in(address: str, folder: Path) -> dict[str, Check]:
    """The checks that every node makes. Limits: HOLDFAST_LEAST_{DISK,MEMORY}_MIB."""
    least_disk = int(os.environ.get("HOLDFAST_LEAST_DISK_MIB", "64")) << 20
    least_memory = int(os.environ.get("HOLDFAST_LEAST_MEMORY_MIB", "64")) << 20
    return {
        "disk": lambda: disk(folder, least_disk),
        "memory": lambda: memory(least_memory),
        "network": lambda: network(address),
        "gpu": gpus,
    }


def load() -> dict[str, Check]:
    """Checks of other packages."""
    return {point.name: point.load() for point in entry_points(group="holdfast.health")}


async def examine(checks: Mapping[str, Check], limit_s: float = _LIMIT_S) -> str | None:
    """Make every check, each in a thread of its own; returns what is wrong, or None."""
    names = list(checks)
    found = await asyncio.gather(*(_one(name, checks[name], limit_s) for name in names))
    return "; ".join(wrong for wrong in found if wrong) or None


async def _one(name: str, check: Check, limit_s: float) -> str | None:
    try:
        async with asyncio.timeout(limit_s):
            wrong = await asyncio.to_thread(check)
    except TimeoutError:
        return f"{name}: no answer within {limit_s:g} s"
    except Exception as error:  # noqa: BLE001 -- the boundary to somebody else's check
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name}: {wrong}" if wrong else None
