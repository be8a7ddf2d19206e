"""Ledger URLs: parsing them, and making the back end that they name.

memory:                                   a new one, in this process
memory:NAME                               shared in this process
sqlite:///relative.db[?sync=full]         one machine, many processes
sqlite:////absolute/path.db               four slashes: an absolute path
etcd://[user:password@]host:port[,host:port...][?tls=1&ca=FILE&cert=FILE&key=FILE&timeout=5]

`timeout` goes before `ledger_call_s` of the table of time-outs.
"""

from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from holdfast.errors import MissingPackage, Mistake
from holdfast.ledger.base import Ledger
from holdfast.ledger.memory import MemoryLedger, shared_hub
from holdfast.machine import state_dir
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["lasting", "open", "without_password"]

_FORMS = "memory:, sqlite:///path/to/file.db or etcd://host:port,host:port"
_TRUE = {"1", "true", "yes", "on"}
_FILES = {"ca", "cert", "key"}


def open(url: str, *, timeouts: Timeouts = DEFAULTS) -> Ledger:
    """Return the ledger that `url` names, not yet started.

    Use `async with open(url) as ledger` or `ledger = await open(url)`. `timeouts` are the times
    that it keeps, and everything built on it; `Mistake` when they are out of order.
    """
    timeouts.check()
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise Mistake(f"{without_password(url)!r} is not a ledger URL: use {_FORMS}")
    if scheme == "memory":
        ledger = _memory(url, rest)
    elif scheme == "sqlite":
        ledger = _sqlite(url, rest, timeouts)
    elif scheme == "etcd":
        ledger = _etcd(url, rest, timeouts)
    else:
        raise Mistake(f"no ledger is called {scheme!r}: use {_FORMS}")
    ledger.url = _lasting(url)
    ledger.timeouts = timeouts
    return ledger


def lasting(url: str | None) -> str:
    """The URL to use, made independent of the folder we are in; None: the user's own ledger."""
    if url is None:
        url = f"sqlite:///{quote(str(state_dir() / 'ledger.db'))}"
    shown = open(url).url
    if not url.startswith("etcd:"):
        return shown
    # That one is for people: without the password, which we and our children need.
    login, without = (one.partition("?")[0].rpartition("@")[0] for one in (url, shown))
    return login + shown.removeprefix(without)


def without_password(url: str) -> str:
    """The URL as it may be shown to people and written to logs."""
    scheme, slashes, rest = url.partition("://")
    user, at, hosts = rest.rpartition("@")
    return f"{scheme}{slashes}{user.split(':')[0]}{at}{hosts}"


def _lasting(url: str) -> str:
    """The URL for others: no password, and no path that depends on this process's folder."""
    address, mark, query = url.partition("?")
    if address.startswith("sqlite:///"):
        path = Path(unquote(address.removeprefix("sqlite:///"))).absolute()
        address = f"sqlite:///{quote(str(path))}"
    else:
        address = without_password(address)
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in _FILES & options.keys():
        options[name] = str(Path(options[name]).absolute())
    query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return f"{address}{mark}{query}"


def _memory(url: str, name: str) -> Ledger:
    if not name:
        return MemoryLedger()
    if "/" in name or "?" in name:
        raise Mistake(f"{url!r}: a memory ledger takes a plain name, as in memory:mine")
    return MemoryLedger(shared_hub(name))


def _sqlite(url: str, rest: str, timeouts: Timeouts) -> Ledger:
    from holdfast.ledger.sqlite import SqliteLedger

    path, options = _split(url, rest, {"sync"})
    if not path.startswith("///") or path == "///":
        raise Mistake(
            f"{url!r}: write sqlite:/// and a path, as in sqlite:///ledger.db or sqlite:////var/lib/ledger.db"
        )
    sync = options.get("sync", "normal")
    if sync not in ("normal", "full"):
        raise Mistake(f"{url!r}: sync is 'normal' (the default) or 'full', not {sync!r}")
    return SqliteLedger(Path(unquote(path[3:])), full_sync=sync == "full", timeouts=timeouts)


def _etcd(url: str, rest: str, timeouts: Timeouts) -> Ledger:
    address, options = _split(url, rest, {"tls", "ca", "cert", "key", "timeout"})
    if not address.startswith("//") or address == "//":
        raise Mistake(
            f"{without_password(url)!r}: write etcd://host:port, several separated by commas"
        )
    login, _, hosts = address[2:].rpartition("@")
    user, _, password = login.partition(":")
    endpoints = [_endpoint(url, one) for one in hosts.split(",")]
    try:
        call_s = float(options.get("timeout", timeouts.ledger_call_s))
    except ValueError:
        call_s = 0.0
    if not 0 < call_s <= 3600:
        raise Mistake(
            f"{without_password(url)!r}: timeout is a number of seconds, "
            f"not {options['timeout']!r}"
        )
    try:
        from holdfast.ledger.etcd import EtcdLedger
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"etcd:// needs the package {error.name} (the extra 'etcd' of holdfast): install it"
        ) from None
    return EtcdLedger(
        endpoints,
        user=unquote(user),
        password=unquote(password),
        tls=options.get("tls", "").lower() in _TRUE,
        ca=_file(options, "ca"),
        cert=_file(options, "cert"),
        key=_file(options, "key"),
        timeout_s=call_s,
        timeouts=timeouts,
    )


def _split(url: str, rest: str, known: set[str]) -> tuple[str, dict[str, str]]:
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise Mistake(
                f"{without_password(url)!r}: unknown option {name!r}; "
                f"there are {', '.join(sorted(known))}"
            )
    return path, options


def _endpoint(url: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Mistake(
            f"{without_password(url)!r}: {text!r} is not host:port, as in etcd://10.0.0.1:2379"
        )
    return host.strip("[]"), int(port)


def _file(options: dict[str, str], name: str) -> Path | None:
    if name not in options:
        return None
    path = Path(options[name])
    if not path.is_file():
        raise Mistake(f"the {name} file {path} is not there")
    return path
