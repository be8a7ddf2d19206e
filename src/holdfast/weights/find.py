"""From a path that somebody typed to a channel and the ledger that counts for it.

Whatever is not a channel's folder gets an error that says what to type instead. Looking
makes nothing: neither a folder nor a ledger.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from holdfast.errors import Denied, Mistake, NotFound
from holdfast.ledger import Ledger, open
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.text import several
from holdfast.weights import about
from holdfast.weights.about import About
from holdfast.weights.book import Book
from holdfast.weights.channel import Channel
from holdfast.weights.layout import number
from holdfast.weights.local import LocalDisk

__all__ = ["Found", "find"]

HIDDEN = ".holdfast"
NAMED_MAX = 10
LEDGER_VARIABLE = "HOLDFAST_LEDGER"


class Found:
    """A channel with its ledger open, and what its folder says about itself."""

    def __init__(self, path: str, channel: Channel, about: About | None) -> None:
        self.path = path
        self.channel = channel
        self.about = about
        self.book = channel.book("command-line", reading=True)

    def ledger_name(self) -> str:
        """The ledger, for people."""
        return "marker files" if self.channel.ledger_url is None else self.channel.ledger_url

    async def sweeping(self, *, foreign: bool, dry_run: bool) -> Book:
        """The book to sweep with, after making sure that the folder may be changed.

        With `foreign` it gives up versions of others too. Without the right to rename and
        remove, versions would be given up in the ledger and stay on the disk.
        """
        if foreign and self.channel.has_ledger:
            raise Mistake(
                f"{self.path} is kept with a ledger, which knows only versions of ours: "
                "leave --foreign out"
            )
        if not dry_run:
            self._check_writable()
            if not self.channel.has_ledger:
                await self.channel.make()
        return self.channel.book("command-line", reading=dry_run, sweep_foreign=foreign)

    def _check_writable(self) -> None:
        layout = self.channel.layout
        hidden = (layout.hidden, layout.trash, layout.drafts, layout.staging)
        mine = () if self.channel.has_ledger else (layout.swept, layout.marks, layout.consumers)
        for path in (layout.base, *hidden, *mine):
            _check_writable(path)

    def check_deletable(self, numbers: Iterable[int]) -> None:
        """Raise `Denied` unless the folders of these versions may be moved and removed."""
        for one in numbers:
            _check_writable(self.channel.layout.version(one))

    async def check_known(self) -> None:
        """Raise `Mistake` when the book has never heard of this channel."""
        if not (await self.book.view()).is_known():
            raise Mistake(
                f"{self.ledger_name()} knows nothing of the channel {self.channel.name} in the "
                f"run {self.channel.run}: check --ledger and --run"
            )

    async def check_ours(self) -> None:
        """Raise `Mistake` unless the book surely speaks of this folder.

        For whoever is about to delete or mark something: with the wrong book, everything
        looks as if it belonged to nobody.
        """
        said = self.about
        if said is not None and said.run != self.channel.run:
            raise Mistake(
                f"{self.path} belongs to the run {said.run}, not to {self.channel.run}: "
                "leave --run out"
            )
        if said is not None and _is_elsewhere(said.folder, self.channel.layout.base):
            raise Mistake(
                f"{self.path} is a copy of {said.folder}, and the ledger speaks of that one: "
                f"name {said.folder}"
            )
        await self.check_known()


@contextlib.asynccontextmanager
async def find(path: str, ledger_url: str | None, run: str | None) -> AsyncIterator[Found]:
    """Open the channel whose folder is `path`.

    `ledger_url` and `run` count for more than what the folder says; "none" means that there
    is no ledger: then the folder of a trainer that is not ours will do. The environment
    variable HOLDFAST_LEDGER helps where the folder does not know the ledger, or not its
    password.
    """
    folder = _folder(path, bare=ledger_url == "none")
    try:
        said = await about.read(LocalDisk(), f"{folder}/{HIDDEN}")
    except PermissionError:
        raise Denied(f"no right to look into {path}/{HIDDEN}") from None
    if said is not None and said.channel != folder.name:
        raise Mistake(
            f"{path} was published as the channel {said.channel}: a folder that was renamed or "
            f"copied is not what the ledger speaks of; give it its name back"
        )
    ledger = _ledger(path, said, ledger_url)
    name = run or (said.run if said else "default")
    async with contextlib.AsyncExitStack() as stack:
        if ledger is not None:
            await stack.enter_async_context(ledger)
        yield Found(path, Channel(folder.parent, ledger, folder.name, run=name), said)


def _folder(path: str, *, bare: bool) -> Path:
    """The channel's folder, or an error with what to type instead.

    A `bare` one has versions in it, and nobody of ours has ever been there.
    """
    if not path:
        raise Mistake("the path is empty: name ROOT/CHANNEL of a Publisher(ROOT, ledger, CHANNEL)")
    folder = Path(os.path.normpath(Path(path).absolute()))
    try:
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "not there: check the path"
            raise NotFound(f"{path} is {what}")
        if _is_channel(folder) or (bare and _has_versions(folder)):
            return folder
        inside = _inside(folder)
        channels = [] if inside else _channels(folder)
        strange = not channels and _has_versions(folder)
    except PermissionError:
        raise Denied(f"no right to look into {path}") from None
    if inside is not None:
        what = "a version" if number(folder.name) is not None else "a folder"
        raise Mistake(f"{path} is {what} inside a channel: name the channel, {inside}")
    if channels:
        names = several([str(Path(path) / name) for name in channels], NAMED_MAX, "; ")
        raise Mistake(f"{path} is not a channel, but channels are in it: name {names}")
    if strange and inside is None:
        raise Mistake(
            f"{path} holds versions of a trainer that is not ours (no folder {HIDDEN}): give "
            "--ledger none"
        )
    raise Mistake(
        f"{path} is not a channel: it has no folder {HIDDEN}. Name ROOT/CHANNEL of a "
        "Publisher(ROOT, ledger, CHANNEL)"
    )


def _is_channel(folder: Path) -> bool:
    return (folder / HIDDEN / "drafts").is_dir()


def _has_versions(folder: Path) -> bool:
    return any(number(one.name) is not None and one.is_dir() for one in folder.iterdir())


def _inside(folder: Path) -> Path | None:
    """The channel that this is a version of, or a hidden folder."""
    if HIDDEN in folder.parts:
        above = Path(*folder.parts[: folder.parts.index(HIDDEN)])
    elif number(folder.name) is not None:
        above = folder.parent
    else:
        return None
    return above if _is_channel(above) else None


def _channels(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if _is_channel(one))


def _ledger(path: str, said: About | None, url: str | None) -> Ledger | None:
    """The ledger that counts, not yet started; None for marker files."""
    given = url is not None
    if url is None:
        url = said.ledger if said is not None else ""
        if url == "" or _lacks_password(url):
            told = os.environ.get(LEDGER_VARIABLE)
            url, given = told or url, bool(told)
        if url == "":
            raise Mistake(
                f"{path} does not say which ledger it belongs to: give --ledger URL or "
                f"{LEDGER_VARIABLE} (or --ledger none for marker files)"
            )
    elif said is not None and (said.ledger is None) != (url == "none"):
        here = "marker files" if said.ledger is None else said.ledger or "a ledger"
        raise Mistake(f"{path} is kept with {here}, and a folder has one book: change --ledger")
    if url is None or url == "none":
        return None
    if not given and _lacks_password(url):
        raise Mistake(
            f"the ledger {url} needs a password, which is not kept: give its URL in the "
            f"environment variable {LEDGER_VARIABLE} (or --ledger URL, which others can see)"
        )
    ledger = open(url)
    if isinstance(ledger, MemoryLedger):
        raise Mistake(f"the ledger {url} lives inside one process: it cannot be asked from here")
    if isinstance(ledger, SqliteLedger) and not ledger.path.exists():
        where = "check the path" if given else "give --ledger URL if it has moved"
        raise NotFound(f"there is no ledger at {ledger.path}: {where}")
    return ledger


def _check_writable(path: str) -> None:
    if Path(path).exists() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise Denied(
            f"no right to write in {path}: nothing was swept; do it as its owner, or change its "
            "mode"
        )


def _lacks_password(url: str | None) -> bool:
    return url is not None and url.startswith("etcd://") and "@" in url


def _is_elsewhere(said: str, folder: str) -> bool:
    """Whether the folder that was meant is there and is another one."""
    try:
        return not Path(said).samefile(folder)
    except OSError:
        return False  # not mounted there on this machine: nothing can be told
