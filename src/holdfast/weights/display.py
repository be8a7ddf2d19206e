"""What `holdfast weights` prints: overviews, versions and reports as lines.

Pure. What others wrote as free text is cleaned on its way out.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.tensors import size as tensor_bytes
from holdfast.text import age, clean, numbers, plural, size, table
from holdfast.weights.overview import ConsumerRow, Details, Overview, VersionRow
from holdfast.weights.policy import Retention
from holdfast.weights.records import Swept, Version
from holdfast.weights.sweep import Report
from holdfast.weights.watching import Happening

__all__ = [
    "happening",
    "overview",
    "overview_json",
    "swept",
    "swept_version",
    "version",
    "version_json",
]

HASH_SHOWN = 12


def _text(value: object) -> str:
    return "" if value is None else str(value)


# ---- ls --------------------------------------------------------------------------


def overview(found: Overview, path: str, ledger: str) -> Iterator[str]:
    """A channel for people."""
    by = f"publisher epoch {found.epoch}" if found.epoch else "no publisher yet"
    yield f"channel {found.channel} of run {found.run}, {by}, {ledger}"
    yield ""
    heads = ("VERSION", "STATE", "SIZE", "OWN", "AGE", "PARENT", "PINNED BY", "SERVED BY")
    yield from table(heads, [_version_cells(row) for row in found.versions], "r.rrrr")
    for row in found.versions:
        if row.problem:
            yield f"  {row.version}: {clean(row.problem)}"
    yield ""
    if found.consumers:
        heads = ("CONSUMER", "STATE", "LEASE", "NEEDS", "FLOOR", "PINS", "SERVES", "STAGED")
        more = ("HOLDS", "ADDRESS")
        rows = [_consumer_cells(one) for one in found.consumers]
        yield from table((*heads, *more), rows, "..r.r.rrr.")
        for one in found.consumers:
            if one.problem:
                yield f"  {clean(one.consumer)}: {clean(one.problem)}"
    else:
        yield "no consumers"
    yield ""
    if found.leftovers:
        cells = [(one.path, size(one.bytes), one.why) for one in found.leftovers]
        yield from table(("LEFTOVER", "SIZE", "WHY"), cells, ".r.")
        yield f"  `holdfast weights sweep {path}` removes what is left over"
        yield ""
    count = sum(row.state in ("published", "damaged") for row in found.versions)
    budget = f" of {size(found.budget_bytes)}" if found.budget_bytes else ""
    what = plural(count, "version")
    yield f"{what}, {size(found.used_bytes)}{budget} on disk, shared files counted once"


def _version_cells(row: VersionRow) -> tuple[str, ...]:
    return (
        str(row.version),
        row.state,
        size(row.bytes),
        size(row.own_bytes),
        "" if row.age_s is None else age(row.age_s),
        _text(row.parent),
        ", ".join(row.pinned_by),
        ", ".join(row.served_by),
    )


def _consumer_cells(row: ConsumerRow) -> tuple[str, ...]:
    if row.silent_s:
        state, lease = f"silent for {row.silent_s:.1f} s", f"ends in {row.lease_left_s:.1f} s"
    else:
        state = "alive" if row.lease_left_s != 0 else "gone"
        lease = "" if row.lease_left_s is None else f"{row.lease_left_s:.1f} s left"
    return (
        clean(row.consumer),
        state,
        lease,
        row.needs,
        _text(row.floor),
        numbers(row.pins),
        _text(row.acknowledged),
        _text(row.staged),
        size(row.holds_bytes) if row.holds_bytes else "",
        clean(row.address, 60),
    )


def overview_json(found: Overview) -> Iterator[dict[str, Any]]:
    """A channel for machines: first itself, then one line per version, consumer, leftover."""
    channel = msgspec.to_builtins(found)
    parts = [channel.pop(name) for name in ("versions", "consumers", "leftovers")]
    yield channel
    for rows in parts:
        yield from rows


# ---- show ------------------------------------------------------------------------


def version(
    found: Details, whole: Overview, record: Version, *, with_tensors: bool
) -> Iterator[str]:
    """One version for people."""
    row = _row(whole, record)
    parent = "no parent" if record.parent is None else f"parent {record.parent}"
    when = f"{age(row.age_s)} ago" if row.age_s is not None else ""
    yield f"version {record.version} of {whole.channel}: {row.state}"
    yield f"  published  {when} by epoch {record.epoch}, {parent}"
    yield f"  content    {record.content}"
    if found.manifest is not None:
        yield f"  kind       {found.manifest.kind}"
    yield f"  size       {size(row.bytes)}, {size(row.own_bytes)} of it not in the one before"
    yield f"  pinned by  {', '.join(row.pinned_by) or '-'}"
    yield f"  served by  {', '.join(row.served_by) or '-'}"
    if row.problem:
        yield f"  problem    {clean(row.problem)}"
    if found.manifest is None:
        yield f"  problem    {clean(found.problem)}"
        return
    yield ""
    files = [
        (
            clean(one.name),
            size(one.bytes),
            one.hash[:HASH_SHOWN],
            numbers(found.shared.get(one.name, ())),
        )
        for one in sorted(found.manifest.files, key=lambda one: one.name)
    ]
    yield from table(("FILE", "SIZE", "HASH", "SHARED WITH"), files, ".r..")
    yield ""
    tensors = sorted(found.manifest.tensors, key=lambda one: one.name)
    if with_tensors:
        cells = [
            (
                clean(one.name),
                one.dtype,
                "x".join(map(str, one.shape)) or "scalar",
                size(tensor_bytes(one.dtype, one.shape)),
                one.file,
                one.hash[:HASH_SHOWN],
            )
            for one in tensors
        ]
        heads = ("TENSOR", "DTYPE", "SHAPE", "SIZE", "FILE", "HASH")
        yield from table(heads, cells, "..rr..")
        yield ""
    total = sum(tensor_bytes(one.dtype, one.shape) for one in tensors)
    hint = "" if with_tensors else " (--tensors lists them)"
    yield f"{plural(len(tensors), 'tensor')}, {size(total)}{hint}"


def swept_version(known: Swept) -> Iterator[str]:
    """What is still known of a deleted version, for people."""
    yield (
        f"version {known.version} was published by epoch {known.epoch} and deleted since; "
        "its number is never used again"
    )
    yield f"  content    {known.content}"


def _row(whole: Overview, record: Version) -> VersionRow:
    """A version's row; it may have been published after the overview was made."""
    late = VersionRow(record.version, "published", record.bytes, record.bytes)
    return next((row for row in whole.versions if row.version == record.version), late)


def version_json(
    found: Details, whole: Overview, record: Version, *, with_tensors: bool
) -> dict[str, Any]:
    """One version for machines."""
    fields: dict[str, Any] = msgspec.to_builtins(_row(whole, record))
    fields["record"] = msgspec.to_builtins(record)
    fields["kind"] = found.manifest.kind if found.manifest else None
    fields["problem"] = found.problem or fields.get("problem", "")
    files = found.manifest.files if found.manifest else ()
    fields["files"] = [
        {**msgspec.to_builtins(one), "shared_with": found.shared.get(one.name, ())}
        for one in files
    ]
    if with_tensors and found.manifest is not None:
        fields["tensors"] = msgspec.to_builtins(found.manifest.tensors)
    return fields


# ---- sweep, watch ----------------------------------------------------------------


def swept(
    report: Report, before: Overview, retention: Retention, base: str, *, dry_run: bool
) -> Iterator[str]:
    """What a sweep did, or would do."""
    would = "would delete" if dry_run else "deleted"
    sizes = {row.version: row.bytes for row in before.versions}
    for one in report.deleted:
        yield f"{would} version {one} ({size(sizes.get(one, 0))})"
    would = "would remove" if dry_run else "removed"
    for path in report.leftovers:
        yield f"{would} {path.removeprefix(base)}"
    if not report.deleted and not report.leftovers:
        yield "nothing to delete"
    for hold in report.holds:
        yield f"{clean(hold.consumer)} holds {numbers(hold.versions)} ({size(hold.bytes)})"
    for path, reason in report.stuck.items():
        yield f"could not remove {path.removeprefix(base)}: {reason}"
    if report.beyond:
        one = len(report.beyond) == 1
        yield (
            f"{plural(len(report.beyond), 'folder')} {'lies' if one else 'lie'} beyond the newest "
            f"version: {'it belongs' if one else 'they belong'} to a publisher at work or to "
            f"another ledger ({numbers(report.beyond)})"
        )
    freed = report.freed_bytes
    budget = f" of {size(retention.max_bytes)}" if retention.max_bytes else ""
    verb = "would be freed" if dry_run else "freed"
    left = max(0, before.used_bytes - freed)
    yield f"{size(freed)} {verb}, {size(left)}{budget} left in use"
    if report.missing_bytes:
        yield f"over the budget by {size(report.missing_bytes)}: see who holds what"


def happening(one: Happening) -> str:
    """One change for people."""
    parts = [f"{one.what:12}"]
    if one.version is not None:
        parts.append(f"version {one.version}")
    if one.consumer:
        parts.append(f"by {clean(one.consumer)}" if one.version is not None else one.consumer)
    if one.detail:
        parts.append(f"({clean(one.detail)})")
    return " ".join(parts)
