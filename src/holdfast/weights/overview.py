"""What an operator wants to know of a channel, put together from disk, book and leases.

`collect` asks; what to show is decided by pure functions. The disk is listed before the book is
read, as in the sweep: what was listed and is not in the book was given up, or is not published
yet.

A consumer is *silent* when it has not renewed its lease for more than half of its time to
live: a living one renews after a third. A dead one is shown until its lease ends; then the
book knows nothing of it any more, and only its staging folder, if it had one, is left.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast.errors import Corrupt, HoldfastError, LeaseLost, TooNew
from holdfast.ledger import LeaseInfo
from holdfast.weights.about import About
from holdfast.weights.book import DELETING, Book, Member, View
from holdfast.weights.channel import Channel
from holdfast.weights.layout import epoch_of, version_folder
from holdfast.weights.manifest import MANIFEST, Manifest
from holdfast.weights.policy import Files, Retention, holds
from holdfast.weights.records import Version
from holdfast.weights.sweep import Scan, Sweeper, files_of, look, on_disk
from holdfast.weights.trouble import translate
from holdfast.weights.writing import read_manifest

__all__ = [
    "ConsumerRow",
    "Details",
    "Overview",
    "VersionRow",
    "collect",
    "details",
]

State = Literal["published", "damaged", "missing", "unfinished", "leftover", "foreign"]
"""What is unfinished is being written, or was when its publisher died: nobody can tell."""


class VersionRow(msgspec.Struct, frozen=True, tag_field="type", tag="version"):
    """One version, or what lies where a version would."""

    version: int
    state: State
    bytes: int
    own_bytes: int
    """What it does not share with the version before it."""
    age_s: float | None = None
    parent: int | None = None
    content: str = ""
    pinned_by: tuple[str, ...] = ()
    served_by: tuple[str, ...] = ()
    problem: str = ""


class ConsumerRow(msgspec.Struct, frozen=True, tag_field="type", tag="consumer"):
    """One life of one consumer."""

    consumer: str
    id: str
    needs: str
    floor: int | None
    """From where on it needs every version; None: only ever the newest."""
    pins: tuple[int, ...]
    acknowledged: int | None
    staged: int | None
    address: str
    problem: str
    lease_left_s: float | None
    """How long it still counts if nothing more is heard of it; None: nobody knows."""
    silent_s: float
    """How long it has been silent; 0 while it renews its lease."""
    holds: tuple[int, ...] = ()
    holds_bytes: int = 0


class Leftover(msgspec.Struct, frozen=True, tag_field="type", tag="leftover"):
    """A folder that nobody needs; the path is relative to the channel's folder."""

    path: str
    bytes: int
    why: str


class Overview(msgspec.Struct, frozen=True, tag_field="type", tag="channel"):
    """A channel as it stands."""

    channel: str
    run: str
    ledger: str | None
    head: int | None
    epoch: int
    used_bytes: int
    """Each file once, however many versions share it."""
    budget_bytes: int | None
    versions: tuple[VersionRow, ...] = ()
    consumers: tuple[ConsumerRow, ...] = ()
    leftovers: tuple[Leftover, ...] = ()


async def collect(channel: Channel, book: Book, about: About | None) -> Overview:
    """Look at everything."""
    sweeper = Sweeper(channel, book, Retention())
    scan = await look(channel)
    view = await sweeper.view()
    if view.versions.keys() - scan.versions.keys():  # published between the two?
        scan.versions = {**(await look(channel)).versions, **scan.versions}
    unknown = scan.versions.keys() - view.versions.keys()
    epochs = {number: await _epoch(channel, number) for number in unknown}
    leases = {member.id: await _lease(channel, view, member) for member in view.members}
    retention = about.policy() if about else None
    return Overview(
        channel.name,
        channel.run,
        channel.ledger_url,
        view.head,
        view.epoch,
        scan.bytes_without(channel.layout),
        retention.max_bytes or None if retention else None,
        tuple(_versions(scan, view, epochs, channel.wall_s())),
        tuple(_consumers(scan, view, leases)),
        tuple(_leftovers(scan, view)),
    )


async def _epoch(channel: Channel, number: int) -> int | None:
    """Which publisher wrote a folder that is not in the book."""
    path = channel.layout.version(number)
    try:
        async with await channel.disk.folder(path) as folder:
            return (await read_manifest(folder, path)).epoch
    except (OSError, Corrupt, TooNew):
        return None


async def _lease(channel: Channel, view: View, member: Member) -> LeaseInfo | None:
    """How long a consumer still counts. None: its time is over, or there is no telling."""
    if channel.has_ledger and member.until_s == float("inf"):
        try:
            return await channel.runtime.ledger.lease_info(int(member.id.rpartition("-")[2]))
        except LeaseLost:
            return LeaseInfo(0, 0.0, 0.0, ())
    left_s = member.until_s - view.now_s
    return None if left_s == float("inf") else LeaseInfo(0, 0.0, max(0.0, left_s), ())


def _versions(
    scan: Scan, view: View, epochs: Mapping[int, int | None], now_s: float
) -> list[VersionRow]:
    rows: list[VersionRow] = []
    before: Files = {}
    pins = [pin for pin in view.pins() if pin.until_s > view.now_s]
    served = [one for one in view.acknowledgements() if one.until_s > view.now_s]
    for number in sorted(view.versions.keys() | scan.versions.keys()):
        record = view.versions.get(number)
        files = files_of(scan.versions.get(number, ()))
        state = _state(number, record, scan, view, epochs)
        rows.append(
            VersionRow(
                number,
                state,
                sum(files.values()) if files or record is None else record.bytes,
                sum(size for inode, size in files.items() if inode not in before),
                round(max(0.0, now_s - record.published_s), 3) if record else None,
                record.parent if record else None,
                record.content if record else "",
                tuple(sorted({pin.consumer for pin in pins if pin.version == number})),
                tuple(sorted({one.consumer for one in served if one.version == number})),
                view.marks.get(number, ""),
            )
        )
        before = files
    for name, draft in scan.drafts.items():
        epoch = epoch_of(name)
        if epoch is not None and epoch >= view.epoch:
            number = int(name.split("-")[1])
            total = sum(draft.values())
            own = sum(size for inode, size in draft.items() if inode not in before)
            rows.append(VersionRow(number, "unfinished", total, own))
    return rows


def _state(
    number: int,
    record: Version | None,
    scan: Scan,
    view: View,
    epochs: Mapping[int, int | None],
) -> State:
    if record is not None:
        if number not in scan.versions:
            return "missing"
        if view.marks.get(number) == DELETING:
            return "leftover"
        return "damaged" if number in view.marks else "published"
    if not any(item.name == MANIFEST for item in scan.versions[number]):
        return "foreign"
    epoch = epochs.get(number)
    if (view.head is None or number > view.head) and epoch is not None and epoch >= view.epoch:
        return "unfinished"
    return "leftover"


def _consumers(
    scan: Scan, view: View, leases: Mapping[str, LeaseInfo | None]
) -> list[ConsumerRow]:
    held = {
        hold.consumer: hold
        for hold in holds(on_disk(scan, view), view.pins(), view.acknowledgements(), view.now_s)
    }
    rows = []
    for member in sorted(view.members, key=lambda one: (one.record.name, one.id)):
        record, info = member.record, leases.get(member.id)
        silent_s = info.ttl_s - info.remaining_s if info is not None else 0.0
        hold = held.get(record.name)
        rows.append(
            ConsumerRow(
                record.name,
                member.id,
                record.needs,
                record.floor if record.needs == "every" else None,
                record.pins,
                record.acknowledged,
                record.staged,
                record.address,
                record.problem,
                None if info is None else round(info.remaining_s, 3),
                round(silent_s, 3) if info is not None and silent_s > info.ttl_s / 2 else 0.0,
                hold.versions if hold else (),
                hold.bytes if hold else 0,
            )
        )
    return rows


def _leftovers(scan: Scan, view: View) -> list[Leftover]:
    """What crashes have left besides versions."""
    living = {member.id for member in view.members if member.until_s > view.now_s}
    found = []
    for name, files in scan.drafts.items():
        epoch = epoch_of(name)
        if epoch is not None and epoch < view.epoch:
            why = f"a publisher that was replaced (epoch {epoch}) did not finish it"
            found.append(_leftover("drafts", name, files, why))
    for name, files in scan.staging.items():
        if name not in living:
            why = f"staged by {name.rpartition('-')[0]}, which is gone"
            found.append(_leftover("staging", name, files, why))
    for name, files in scan.trash.items():
        number = name.partition("-")[0]
        what = version_folder(int(number)) if number.isdecimal() else "something"
        found.append(_leftover("trash", name, files, f"{what}, given up and not yet removed"))
    return found


def _leftover(where: str, name: str, files: Files, why: str) -> Leftover:
    return Leftover(f".holdfast/{where}/{name}", sum(files.values()), why)


class Details(msgspec.Struct, frozen=True):
    """A version's manifest, or why it cannot be read, and what its files share."""

    manifest: Manifest | None
    problem: str
    shared: dict[str, tuple[int, ...]]
    """By file: the other versions that have the very same file."""


async def details(channel: Channel, record: Version) -> Details:
    """Read a version's manifest and compare its inodes with those of the others."""
    manifest, problem = await _manifest(channel, record)
    versions = (await look(channel)).versions
    owners: dict[int, list[int]] = {}
    for number in sorted(versions.keys() - {record.version}):
        for item in versions[number]:
            owners.setdefault(item.inode, []).append(number)
    own = versions.get(record.version, ())
    shared = {item.name: tuple(owners.get(item.inode, ())) for item in own}
    return Details(manifest, problem, shared)


async def _manifest(channel: Channel, record: Version) -> tuple[Manifest | None, str]:
    """A version's manifest, or why there is none."""
    if not record.manifest:
        return None, "it has no manifest: somebody else's trainer has written it"
    path = channel.layout.version(record.version)
    try:
        async with await channel.disk.folder(path) as folder:
            return await read_manifest(folder, path), ""
    except OSError as error:
        return None, str(translate(error, "its files cannot be read"))
    except HoldfastError as error:
        return None, str(error)
