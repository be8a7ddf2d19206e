"""Store URLs: parsing them, and making the store that they name.

memory:                          a new one, in this process
memory:NAME                      shared in this process
shm://NAME[?budget=4G&segment=64M]            one machine, many processes
redis://[user:password@]host:port[/db][?prefix=holdfast:&timeout=5]
mooncake://master:port?metadata=http://host:port/metadata[&segment=4G&host=ADDRESS&...]

Names come from outside; they are checked before they become part of a path or a key.
"""

from importlib import import_module
from urllib.parse import parse_qsl, urlsplit

from holdfast.errors import MissingPackage, Mistake
from holdfast.ledger import without_password
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.backend import Backend
from holdfast.transfer.memory import MemoryBackend
from holdfast.transfer.store import Store

__all__ = ["backend", "connect", "without_password"]

_FORMS = "memory:, shm://NAME, redis://host:port or mooncake://master:port?metadata=URL"
_MODULES = {
    "shm": "holdfast.transfer.shm",
    "redis": "holdfast.transfer.redis",
    "rediss": "holdfast.transfer.redis",
    "mooncake": "holdfast.contrib.mooncake",
}
"""What has `from_url`: imported when such a URL is opened, because of what it needs."""
_shared: dict[str, MemoryBackend] = {}


def connect(url: str, policy: Policy | None = None, *, timeouts: Timeouts = DEFAULTS) -> Store:
    """The store that `url` names: `with connect(url) as store`.

    It tries again as `policy` says, or eight times within the `store_deadline_s` of `timeouts`;
    `Mistake` when these are out of order.
    """
    timeouts.check()
    return Store(backend(url, timeouts), policy, timeouts=timeouts)


def backend(url: str, timeouts: Timeouts = DEFAULTS) -> Backend:
    """The back end alone."""
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise Mistake(f"{without_password(url)!r} is not the URL of a store: use {_FORMS}")
    if scheme == "memory":
        return _memory(url, rest)
    if scheme not in _MODULES:
        raise Mistake(f"no store is called {scheme!r}: use {_FORMS}")
    try:
        made: Backend = import_module(_MODULES[scheme]).from_url(url, timeouts)
    except ImportError as error:
        extras = "transfer,mooncake" if scheme == "mooncake" else "transfer"
        raise MissingPackage(
            f"{scheme}:// needs the package {error.name} ({error}): "
            f"pip install 'holdfast-rl[{extras}]'"
        ) from error
    made.url = without_password(url)
    return made


def _memory(url: str, name: str) -> Backend:
    if "/" in name or "?" in name:
        raise Mistake(f"{url!r}: a store in memory takes a plain name, as in memory:mine")
    return _shared.setdefault(name, MemoryBackend()) if name else MemoryBackend()


def options(url: str, known: set[str]) -> dict[str, str]:
    """The options behind the question mark; unknown ones are a `Mistake`."""
    found = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for name in found:
        if name not in known:
            raise Mistake(
                f"{without_password(url)!r}: unknown option {name!r}; "
                f"there are {', '.join(sorted(known))}"
            )
    return found
