"""Following a prefix: first everything, then every change, without a gap.

A watch alone tells of changes only, and when history was compacted it has to begin again.
`follow` does both: it yields the whole range once, then one step per transaction, and the
whole range again whenever history was lost or the ledger was away.
"""

from collections.abc import AsyncGenerator

import msgspec

from holdfast.errors import Compacted, Retriable
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Batch, Entry
from holdfast.retry import Pauses

__all__ = ["Step", "follow"]


class Step(msgspec.Struct, frozen=True):
    """The prefix after one transaction. `change` is None when it was read as a whole.

    `entries` is shared between steps: read it, do not keep it.
    """

    revision: int
    entries: dict[str, Entry]
    change: Batch | None


async def follow(runtime: Runtime, prefix: str) -> AsyncGenerator[Step, None]:
    """Yield the state of a prefix, then again after every transaction that changes it.

    Goes on for ever: a ledger that is away is tried again. Close the iterator
    (`contextlib.aclosing`) when done.
    """
    pauses = Pauses(runtime)
    while True:
        try:
            whole = await runtime.ledger.range(prefix)
            pauses.reset()
            entries = {entry.key: entry for entry in whole.entries}
            yield Step(whole.revision, entries, None)
            async with runtime.ledger.watch(prefix, start=whole.revision + 1) as watch:
                async for batch in watch:
                    for event in batch.events:
                        if event.entry is None:
                            entries.pop(event.key, None)
                        else:
                            entries[event.key] = event.entry
                    yield Step(batch.revision, entries, batch)
        except Compacted:
            continue
        except Retriable as error:
            await pauses.wait(error)
