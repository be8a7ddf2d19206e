"""Making room before a version is written: sweep, then wait or fail while others hold it."""

import asyncio
import contextlib
from collections.abc import Sequence

from holdfast import events
from holdfast.errors import NoRoom, TooLarge
from holdfast.weights.book import Book
from holdfast.weights.policy import Hold, Retention
from holdfast.weights.sweep import Report, Sweeper

__all__ = ["Waiting", "make_room"]


class Waiting(events.Event, frozen=True, tag="weights.waiting"):
    """A publisher waits for room because consumers hold the budget."""

    version: int
    missing_bytes: int
    consumers: tuple[str, ...]


async def make_room(
    sweeper: Sweeper, book: Book, policy: Retention, step: int, new_bytes: int
) -> None:
    """Return when `new_bytes` fit into the budget; else an error names who holds what."""
    if policy.max_bytes and new_bytes > policy.max_bytes:
        raise TooLarge(
            f"version {step} has {new_bytes} new bytes, the budget of the channel is "
            f"{policy.max_bytes}: raise max_bytes",
            version=step,
        )
    report = await sweeper.sweep(new_bytes)
    if report.missing_bytes and policy.when_full == "wait" and report.holds:
        events.emit(
            Waiting(
                version=step,
                missing_bytes=report.missing_bytes,
                consumers=tuple(hold.consumer for hold in report.holds),
            )
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(policy.wait_s):
                report = await _until_room(sweeper, book, new_bytes)
    if report.missing_bytes:
        raise NoRoom(
            f"version {step} needs {new_bytes} bytes, {report.missing_bytes} more than the "
            f"budget of {policy.max_bytes} has left: {_holders(report.holds)}",
            version=step,
        )


async def _until_room(sweeper: Sweeper, book: Book, new_bytes: int) -> Report:
    async with contextlib.aclosing(book.changes()) as changes:
        async for _ in changes:
            report = await sweeper.sweep(new_bytes)
            if not report.missing_bytes:
                return report
    raise AssertionError("changes go on for ever")


def _holders(holds: Sequence[Hold]) -> str:
    if not holds:
        return "no consumer holds anything: raise max_bytes or keep less"
    more = f"; and {len(holds) - 10} more" if len(holds) > 10 else ""
    return (
        "; ".join(
            f"{hold.consumer} holds versions {_numbers(hold.versions)} ({hold.bytes} bytes)"
            for hold in holds[:10]
        )
        + more
    )


def _numbers(versions: Sequence[int]) -> str:
    shown = ", ".join(map(str, versions[:5]))
    return shown if len(versions) <= 5 else f"{shown} … {versions[-1]}"
