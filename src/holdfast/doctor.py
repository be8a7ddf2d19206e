"""`holdfast doctor`: what would go wrong on this machine, before it does.

Every check is a function of its readings to a `Check`, so that any machine can be made
up in a test; `examine` takes the readings of this one. Invariants: nothing is changed (a
ledger file that is not there is not made), nothing takes longer than a bound, and every
warning and failure says what to do.
"""

import asyncio
import ctypes
import dataclasses
import importlib.util
import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote

import click

from holdfast.errors import HoldfastError, MissingPackage, Mistake
from holdfast.machine import (
    UNKNOWN_FILE_SYSTEM,
    boot_id,
    file_system_of,
    is_network_file_system,
)
from holdfast.servers import installed
from holdfast.text import plural, size
from holdfast.timeouts import Timeouts

__all__ = ["EXTRAS", "SERVERS", "Check", "doctor", "examine", "render"]

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]
_GIB = 1 << 30
_MIB = 1 << 20
_PYTHON_MIN = (3, 11)
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has on any platform
_SHM = Path("/dev/shm")  # noqa: S108 -- not a temporary file: the file system itself

# Extra -> the modules that it brings.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "client": ("httpx",),
    "etcd": ("aiohttp",),
    "gateway": ("httptools", "httpx", "uvloop"),
    "mooncake": ("httpx", "mooncake"),
    "run": ("httpx", "httptools", "torch", "transformers", "rich"),
    "train": ("torch", "safetensors", "transformers", "peft", "zstandard"),
    "transfer": ("numpy", "xxhash"),
    "views": ("rich",),
    "vllm": ("aiohttp",),
    "weights": ("numpy", "xxhash"),
}
SERVERS: tuple[str, ...] = ("etcd", "redis-server")


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to do; only a healthy finding has none."""

    name: str
    status: Status
    detail: str
    advice: str = ""


# ---- checks: readings in, finding out --------------------------------------------


def _enough(
    name: str, detail: str, amount: int, need: tuple[int, str], want: tuple[int, str]
) -> Check:
    """Less than is needed fails, less than is wanted warns; each with its advice."""
    if amount < need[0]:
        return Check(name, "fail", detail, need[1])
    if amount < want[0]:
        return Check(name, "warn", detail, want[1])
    return Check(name, "ok", detail)


def check_python(version: Sequence[int]) -> Check:
    """The interpreter is new enough."""
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) >= _PYTHON_MIN:
        return Check("python", "ok", text)
    wanted = ".".join(map(str, _PYTHON_MIN))
    return Check("python", "fail", text, f"install Python {wanted} or newer")


def check_disk(path: Path, free_bytes: int | None) -> Check:
    """The disk has room for weights and logs; None means that the path is not there."""
    if free_bytes is None:
        detail = f"{path} is no folder that can be written to"
        return Check("disk", "fail", detail, "make it, or name another")
    return _enough(
        "disk",
        f"{size(free_bytes)} free at {path}",
        free_bytes,
        (_GIB, "free at least 1 GiB, or choose another --path"),
        (10 * _GIB, "weights need room: free 10 GiB, or choose another --path"),
    )


def check_shared_memory(total_bytes: int, free_bytes: int) -> Check:
    """Shared memory can carry samples between processes; a total of 0 means there is none."""
    if not total_bytes:
        return Check("shm", "fail", f"{_SHM} is missing", f"mount a tmpfs at {_SHM}")
    return _enough(
        "shm",
        f"{size(free_bytes)} free of {size(total_bytes)} at {_SHM}",
        free_bytes,
        (64 * _MIB, "run `holdfast clean`; in a container, raise --shm-size"),
        (_GIB, "remount it with size=4g; in a container, --shm-size=4g"),
    )


def check_file_system(path: Path, fstype: str, mount_point: str, *, sqlite: bool) -> Check:
    """Locks hold on the file system of `path`; `sqlite` says whether a ledger lies there."""
    name = "file system"
    detail = f"{path} is on {fstype}, mounted at {mount_point}"
    if is_network_file_system(fstype) and sqlite:
        advice = "put the sqlite ledger on a local disk, or use etcd://host:port"
        return Check(name, "fail", detail, advice)
    if is_network_file_system(fstype):
        advice = "weights may lie here, but never a sqlite ledger: use etcd"
        return Check(name, "warn", detail, advice)
    if fstype == UNKNOWN_FILE_SYSTEM or fstype.startswith("fuse"):
        advice = "make sure that it is local and keeps locks before you put a ledger there"
        return Check(name, "warn", detail, advice)
    return Check(name, "ok", detail)


def check_clock(boottime_s: float | None, synchronised: bool | None, boot: str | None) -> Check:
    """Leases can be timed; None means that the machine does not tell."""
    if boottime_s is None:
        return Check("clock", "fail", "CLOCK_BOOTTIME is not there", "use Linux 2.6.39 or newer")
    if boot is None:
        return Check("clock", "fail", "the boot id cannot be read", "mount /proc")
    detail = f"boot {boot[:8]}, up {boottime_s / 3600:.1f} h"
    if synchronised is False:
        advice = "run chrony or systemd-timesyncd: times in logs of several hosts will not match"
        return Check("clock", "warn", f"{detail}, not synchronised", advice)
    if synchronised is None:
        return Check("clock", "ok", f"{detail}, synchronisation unknown")
    return Check("clock", "ok", f"{detail}, synchronised")


def check_open_files(soft: int, hard: int) -> Check:
    """Enough descriptors may be open; a negative limit is none."""
    advice = "raise it: ulimit -n 65536, or LimitNOFILE=65536 in the service"
    detail = f"{_limit(soft)} (at most {_limit(hard)})"
    amount = sys.maxsize if soft < 0 else soft
    return _enough("open files", detail, amount, (256, advice), (4096, advice))


def check_loopback(port: int | None, error: str = "") -> Check:
    """A server can be started on the loopback address."""
    if port is None:
        advice = "bring the interface up: ip link set lo up"
        return Check("loopback", "fail", f"no port can be bound on 127.0.0.1: {error}", advice)
    return Check("loopback", "ok", f"port {port} could be bound on 127.0.0.1")


def check_extra(extra: str, missing: Sequence[str]) -> Check:
    """The optional packages of an extra are installed."""
    name = f"extra {extra}"
    if missing:
        detail = f"{', '.join(missing)} not installed"
        return Check(name, "warn", detail, f"if you need it: pip install 'holdfast-rl[{extra}]'")
    return Check(name, "ok", f"{', '.join(EXTRAS.get(extra, ()))} installed")


def check_server(program: str, found: str | None) -> Check:
    """A server program for local use. Not having one is no fault."""
    return Check(program, "ok", found or "not installed here; a remote one does as well")


def check_timeouts(path: Path) -> Check:
    """The table [timeouts] of a TOML file is valid and in order."""
    try:
        times = Timeouts.read(path)
    except Mistake as error:
        advice = "see docs/TIMEOUTS.md for the names and the order that the times must keep"
        return Check("time-outs", "fail", str(error), advice)
    told = f"{len(times.model_fields_set)} set in {path}, all in order"
    return Check("time-outs", "ok", f"{told}; used where HOLDFAST_TIMEOUTS={path}")


def check_ledger(url: str, limit_s: float) -> Check:
    """The ledger answers one linearizable read within `limit_s`."""
    from holdfast.ledger import without_password

    shown = without_password(url)
    path = _sqlite_path(url)
    if path is not None and not path.exists():
        return _check_future_file(path)
    try:
        round_trip_s = asyncio.run(_round_trip(url, limit_s))
    except TimeoutError:
        advice = "check that the server runs and that no firewall swallows the packets"
        return Check("ledger", "fail", f"{shown}: no answer within {limit_s:g} s", advice)
    except MissingPackage as error:
        return Check("ledger", "fail", str(error), "install what is missing")
    except Mistake as error:
        return Check("ledger", "fail", str(error), "correct --ledger")
    except HoldfastError as error:
        advice = "start the server, or correct --ledger"
        return Check("ledger", "fail", f"{shown}: {error}", advice)
    return Check("ledger", "ok", f"{shown} answered in {round_trip_s * 1000:.1f} ms")


def _check_future_file(path: Path) -> Check:
    folder = path.absolute().parent
    if os.access(folder, os.W_OK | os.X_OK):
        return Check("ledger", "ok", f"{path} is not there yet; whoever opens it first makes it")
    advice = f"make {folder} and allow writing there"
    return Check("ledger", "fail", f"{path} cannot be made", advice)


async def _round_trip(url: str, limit_s: float) -> float:
    import holdfast.ledger

    async with asyncio.timeout(limit_s), holdfast.ledger.open(url) as ledger:
        start = time.monotonic()
        await ledger.get("/holdfast/doctor")
        return time.monotonic() - start


# ---- readings of this machine ----------------------------------------------------


def examine(
    *, path: Path, ledger: str | None = None, config: Path | None = None
) -> tuple[Check, ...]:
    """Take all readings of this machine and check them."""
    ledger_path = _sqlite_path(ledger) if ledger else None
    boottime_s = _read(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    checks = [
        check_python(sys.version_info[:3]),
        check_disk(path, _read(lambda: _free_bytes(path))),
        check_shared_memory(*(_read(lambda: shutil.disk_usage(_SHM)[::2]) or (0, 0))),
        # With no ledger named, the embedded default would lie at the path.
        check_file_system(path, *file_system_of(path), sqlite=ledger is None),
    ]
    if ledger_path is not None:
        checks.append(check_file_system(ledger_path, *file_system_of(ledger_path), sqlite=True))
    checks += [
        check_clock(boottime_s, _synchronised(), _read(boot_id)),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        _loopback(),
    ]
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        checks.append(check_extra(extra, missing))
    checks += [check_server(program, installed(program)) for program in SERVERS]
    if config is not None:
        checks.append(check_timeouts(config))
    if ledger is not None:
        # A little longer than the ledger's own limit: its reason says more than our silence.
        checks.append(check_ledger(ledger, Timeouts().ledger_call_s + 1.0))
    return tuple(checks)


def _free_bytes(path: Path) -> int:
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise NotADirectoryError(path)
    return shutil.disk_usage(path).free


def _read(reading: Callable[[], T]) -> T | None:
    """A reading, or None where this machine does not give it."""
    try:
        return reading()
    except (OSError, UnicodeDecodeError, AttributeError, HoldfastError):
        return None


def _synchronised() -> bool | None:
    """Ask the kernel's clock; asking needs no rights and changes nothing."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _CLOCK_UNSYNCHRONISED


def _loopback() -> Check:
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return check_loopback(sock.getsockname()[1])
    except OSError as error:
        return check_loopback(None, str(error))


def _sqlite_path(url: str) -> Path | None:
    scheme, _, rest = url.partition(":///")
    return Path(unquote(rest.partition("?")[0])) if scheme == "sqlite" and rest else None


# ---- showing ---------------------------------------------------------------------


def render(checks: Sequence[Check]) -> str:
    """The findings as a table for a terminal, advice below what needs it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
        if check.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.advice}")
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    lines.append(f"{len(checks)} checks, {failed} failed, {plural(warned, 'warning')}")
    return "\n".join(lines)


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


@click.command()
@click.option("--ledger", metavar="URL", help="Also read from this ledger, and time it.")
@click.option(
    "--config",
    metavar="FILE.toml",
    type=click.Path(path_type=Path),
    help="Also check the time-outs in this file.",
)
@click.option(
    "--path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where runs will be kept; the current folder by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(ledger: str | None, config: Path | None, path: Path, as_json: bool) -> None:
    """Check whether Holdfast can work on this machine.

    Nothing is changed. Ends with 0 when nothing failed (warnings are allowed), else with 1.

    \b
    Examples:
      holdfast doctor
      holdfast doctor --path /data/runs --ledger etcd://10.0.0.1:2379
      holdfast doctor --config run.toml --json
    """
    checks = examine(path=path, ledger=ledger, config=config)
    healthy = all(check.status != "fail" for check in checks)
    if as_json:
        found = [dataclasses.asdict(check) for check in checks]
        click.echo(json.dumps({"ok": healthy, "checks": found}, indent=2))
    else:
        click.echo(render(checks))
    sys.exit(0 if healthy else 1)
