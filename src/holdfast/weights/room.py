"""Making room before a version is written: sweep, then wait or fail while others hold it."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from holdfast import events
from holdfast.errors import HoldfastError, NoRoom, TooLarge
from holdfast.text import numbers, size
from holdfast.timeouts import Timeouts
from holdfast.weights.book import Book
from holdfast.weights.policy import Hold, Retention
from holdfast.weights.sweep import Report, Sweeper

__all__ = ["Waiting", "holders", "make_room"]

LOG = logging.getLogger("holdfast")


class Waiting(events.Event, frozen=True, tag="weights.waiting"):
    """A publisher waits for room because consumers hold the budget."""

    version: int
    missing_bytes: int
    consumers: tuple[str, ...]


async def make_room(
    sweeper: Sweeper, book: Book, policy: Retention, step: int, new_bytes: int, timeouts: Timeouts
) -> None:
    """Return when `new_bytes` fit into the budget; else an error names who holds what."""
    if policy.max_bytes and new_bytes > policy.max_bytes:
        raise TooLarge(
            f"version {step} has {size(new_bytes)} of new files, the budget of the channel is "
            f"{size(policy.max_bytes)}: raise max_bytes",
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
        try:
            async with asyncio.timeout(policy.wait_s):
                report = await _until_room(sweeper, book, step, new_bytes, report, timeouts)
        except TimeoutError:  # we may have been stopped meanwhile: look once more
            report = await sweeper.sweep(new_bytes)
    if report.missing_bytes:
        raise NoRoom(
            f"version {step} needs {size(new_bytes)}, {size(report.missing_bytes)} more than "
            f"the budget of {size(policy.max_bytes)} has left: {holders(report.holds)}",
            version=step,
        )


async def _until_room(
    sweeper: Sweeper, book: Book, step: int, new_bytes: int, report: Report, timeouts: Timeouts
) -> Report:
    telling = asyncio.create_task(_tell(step, report, timeouts.room_tell_s))
    try:
        async with contextlib.aclosing(book.changes()) as changes:
            coming = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    # A ledger does not tell of consumers that only write LOADED_STEP.
                    await asyncio.wait({coming}, timeout=timeouts.marker_poll_s)
                    if coming.done():
                        coming.result()
                        coming = asyncio.ensure_future(anext(changes))
                    report = await sweeper.sweep(new_bytes)
                    if not report.missing_bytes:
                        return report
            finally:
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, HoldfastError):
                    await coming
    finally:
        telling.cancel()


async def _tell(step: int, report: Report, every_s: float) -> None:
    """Say who is waited for, again and again, where people look."""
    while True:
        LOG.warning(
            "version %d waits for %s: %s", step, size(report.missing_bytes), holders(report.holds)
        )
        await asyncio.sleep(every_s)


def holders(holds: Sequence[Hold]) -> str:
    """Who keeps what, for people."""
    if not holds:
        return "no consumer holds anything: raise max_bytes or keep less"
    more = f"; and {len(holds) - 10} more" if len(holds) > 10 else ""
    return (
        "; ".join(
            f"{hold.consumer} holds {numbers(hold.versions)} ({size(hold.bytes)})"
            for hold in holds[:10]
        )
        + more
    )
