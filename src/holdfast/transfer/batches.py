"""Many keys in parts that a back end can take, and back again. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    found = portions(items.items(), most_keys, most_bytes, lambda one: weigh(one[1]))
    return [dict(part) for part in found] or [items]


def portions(
    items: Iterable[T],
    most: int,
    most_weight: int = 1 << 62,
    weigh: Callable[[T], int] = lambda _: 0,
) -> Iterator[list[T]]:
    """The same items, so many at a time at most, and, unless one alone has more, such a weight."""
    part: list[T] = []
    total = 0
    for item in items:
        weight = weigh(item)
        if part and (len(part) == most or total + weight > most_weight):
            yield part
            part, total = [], 0
        part.append(item)
        total += weight
    if part:
        yield part


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
