"""Adding samples to the newest block, or to a new one. Pure.

Few and small samples go into the newest block as long as that is small: a claim then
touches few blocks, and adding rewrites little. Everything else begins a block of its own.
"""

from collections.abc import Sequence

import msgspec

from holdfast.errors import TooLarge
from holdfast.ledger import Compare, Op, absent, unchanged
from holdfast.ledger.records import decode, put
from holdfast.transfer.batches import portions
from holdfast.transfer.queue.records import Block, Head, Keys, Sample
from holdfast.transfer.queue.view import View

__all__ = ["add", "chunks"]

MAX_BYTES = 600_000
SMALL_BYTES = 32_768

_encoder = msgspec.json.Encoder()


def chunks(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Runs of samples that fit into one block each."""
    if len(samples) <= most and len(_encoder.encode(samples)) <= MAX_BYTES // 4:
        return [list(samples)]
    return list(portions(samples, most, MAX_BYTES, _length))


def _length(one: Sample) -> int:
    length = len(_encoder.encode(one)) + 1
    if length > MAX_BYTES // 4:
        raise TooLarge(
            f"the record of sample {one.key} has {length} bytes: keep large things in fields, "
            "not in tags",
            key=one.key,
        )
    return length


def add(
    view: View, keys: Keys, samples: Sequence[Sample], most: int
) -> tuple[list[Compare], list[Op]]:
    """The transaction that adds samples, none of which the view knows."""
    head, entry = view.head, view.head_entry
    compare = [unchanged(entry) if entry else absent(keys.head)]
    number, before = head.block + 1, None
    tail = view.blocks.get(head.block)
    if tail is not None and tail.entry is not None:
        room = most - tail.all.bit_length()
        if len(tail.entry.value) < SMALL_BYTES and len(samples) <= min(room, 64):
            number, before = head.block, tail.entry
    there = decode(Block, before).samples if before else ()
    block = Block(samples=(*there, *samples))
    newest = max(head.newest, *(one.version for one in samples))
    then: list[Op] = [
        put(
            keys.head,
            Head(block=number, samples=head.samples + len(samples), newest=newest),
            over=entry,
        ),
        put(keys.block(number), block, over=before),
    ]
    compare.append(unchanged(before) if before else absent(keys.block(number)))
    return compare, then
