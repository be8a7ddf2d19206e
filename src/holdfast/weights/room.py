"""Making room before a version is written: sweep, then wait or fail while others hold it."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from holdfast import events
from holdfast.errors import NoRoom, TooLarge
from holdfast.text import numbers, several, size
from holdfast.timeouts import Timeouts
from holdfast.weights.book import Book, at_least_every
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
        telling = asyncio.create_task(_tell(step, report, timeouts.room_tell_s))
        # A ledger does not tell of consumers that only write LOADED_STEP.
        paced = at_least_every(timeouts.marker_poll_s, book.changes())
        try:
            async with asyncio.timeout(policy.wait_s), contextlib.aclosing(paced) as changes:
                async for _ in changes:
                    report = await sweeper.sweep(new_bytes)
                    if not report.missing_bytes:
                        break
        except TimeoutError:  # we may have been stopped meanwhile: look once more
            report = await sweeper.sweep(new_bytes)
        finally:
            telling.cancel()
    if report.missing_bytes:
        raise NoRoom(
            f"version {step} needs {size(new_bytes)}, {size(report.missing_bytes)} more than "
            f"the budget of {size(policy.max_bytes)} has left: {holders(report.holds)}",
            version=step,
        )


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
    each = [f"{one.consumer} holds {numbers(one.versions)} ({size(one.bytes)})" for one in holds]
    return several(each, 10, "; ", "; and ")
