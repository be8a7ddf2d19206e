"""Compaction: what lives in a mostly dead segment is moved to where there is room.

The caller holds the exclusive lock of the segment, so nothing in it is deleted meanwhile.
Values keep their versions; the copies are committed like any put, and only then the originals
are buried. Whoever finds an original dead sees the copy on the board. A death in between
leaves two copies of a value: a delete kills both, and `burial.part_twins` one of them.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from holdfast import faults
from holdfast.transfer.shm.catalog import Catalog
from holdfast.transfer.shm.layout import MAX_BATCH, OVERHEAD, Ints, costs, make_directory
from holdfast.transfer.shm.segment import Segment
from holdfast.transfer.shm.writer import Draft, Writer

__all__ = ["mostly_dead", "move"]

LOCKED = faults.declare("shm.compact.locked", "a mostly dead segment is locked")
COPIED = faults.declare("shm.compact.copied", "its living values are copied, not committed")
MOVED = faults.declare("shm.compact.committed", "there are two copies of each")
BURIED = faults.declare("shm.compact.buried", "the originals are dead")


def mostly_dead(catalog: Catalog) -> list[Segment]:
    """Segments of which at most half lives, those with the least first."""
    found = []
    for segment in catalog.segments.values():
        living = segment.living_bytes()
        if living and 2 * living <= segment.table.size(segment.number):
            found.append((living, segment))
    return [segment for _, segment in sorted(found, key=lambda one: one[0])]


def move(
    catalog: Catalog,
    writer: Writer,
    source: Segment,
    place: Callable[[int, Segment], Segment | None],
) -> bool:
    """Move what lives in `source`. False if that was not possible; nothing has changed then."""
    faults.point(LOCKED)
    catalog.refresh()
    if source.table.life(source.number) != source.life:
        return False
    keys: list[str] = []
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    for batch in source.batches:
        living = np.flatnonzero(batch.dead() == 0)
        for position in living.tolist():
            top = catalog.index.settle(batch.keys[position])
            if top is None or catalog.index.place(top) != (batch, position):
                return False  # replaced and not buried, or a twin: that comes first
            keys.append(batch.keys[position])
        generations, stamps = batch.all_versions()
        columns.append(
            (batch.starts[living], batch.sizes[living], generations[living], stamps[living])
        )
    if len(keys) > MAX_BATCH:
        return False
    begins, sizes, generations, stamps = (
        np.concatenate(one) for one in zip(*columns, strict=True)
    )
    target = place(OVERHEAD + int(costs(keys, sizes, True).sum()), source)
    if target is None:
        return False
    versions = (generations, stamps)
    draft = Draft(target, keys, sizes, make_directory(keys, sizes, versions), 0, 0, versions)

    def write(memory: npt.NDArray[np.uint8], starts: Ints) -> None:
        ends = (begins + sizes).tolist()
        for to, begin, end in zip(starts.tolist(), begins.tolist(), ends, strict=False):
            memory[to : to + end - begin] = source.memory[begin:end]

    writer.fill(draft, write)
    faults.point(COPIED)
    writer.commit(draft)
    faults.point(MOVED)
    for batch in source.batches:
        batch.dead()[:] = 1
    faults.point(BURIED)
    index = catalog.index
    index.forget(
        [name for key in keys for name in index.older.get(key, ()) if not index.live(name)]
    )
    return True
