"""Many keys in parts that a back end can take, and back again. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from holdfast.errors import HoldfastError
from holdfast.retry import Partial

__all__ = ["collect", "named", "portions", "split"]

T = TypeVar("T")
V = TypeVar("V")


def split(
    items: Mapping[str, T], weigh: Callable[[T], int], most_keys: int, most_bytes: int
) -> list[Mapping[str, T]]:
    """Parts with at most so many keys and, unless one key alone has more, so many bytes."""
    if len(items) <= most_keys and most_bytes >= 1 << 62:
        return [items]
    parts: list[Mapping[str, T]] = []
    part: dict[str, T] = {}
    nbytes = 0
    for key, item in items.items():
        weight = weigh(item)
        if part and (len(part) == most_keys or nbytes + weight > most_bytes):
            parts.append(part)
            part, nbytes = {}, 0
        part[key] = item
        nbytes += weight
    return [*parts, part]


def portions(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The same items, so many at a time at most."""
    return (items[at : at + most] for at in range(0, len(items), most))


def collect(keys: Iterable[str], parts: Iterable[Partial[V]]) -> Partial[V]:
    """All parts as one, in the order of the keys."""
    values: dict[str, V] = {}
    failures: dict[str, Exception] = {}
    for part in parts:
        values.update(part.values)
        failures.update(part.failures)
    return Partial(
        {key: values[key] for key in keys if key in values},
        {key: failures[key] for key in keys if key in failures},
    )


def named(found: Partial[V]) -> Partial[V]:
    """The same; every error begins with the key that it befell, and carries it.

    A back end may have one error for all keys of a call, or speak of its own names for them.
    """
    if not found.failures:
        return found
    return Partial(found.values, {key: _named(key, why) for key, why in found.failures.items()})


def _named(key: str, error: Exception) -> Exception:
    if not isinstance(error, HoldfastError):
        return error
    if error.key == key and key in str(error):
        return error
    about = type(error)(f"{key}: {error}", key=key, retry_after_s=error.retry_after_s)
    about.__cause__ = error
    return about
