"""One channel: its folder, its file system, its clock, and the book that counts for it."""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from holdfast.errors import Mistake
from holdfast.ledger import Compare, Ledger, LiveRuntime, Runtime
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.weights.book import Book
from holdfast.weights.disk import Disk
from holdfast.weights.layout import Layout, check_name
from holdfast.weights.ledger_book import LedgerBook
from holdfast.weights.local import LocalDisk
from holdfast.weights.marker_book import MarkerBook
from holdfast.weights.records import Keys

__all__ = ["Channel"]

LOG = logging.getLogger("holdfast")


class Channel:
    """What publishers, subscribers and sweeps of one channel have in common.

    `ledger=None` means marker files alone. `runtime` and `disk` are the real world unless a
    simulation gives others; a runtime brings its ledger along, unless `markers` says that
    there is none.
    """

    def __init__(
        self,
        root: str | Path,
        ledger: Ledger | None,
        channel: str,
        *,
        run: str = "default",
        runtime: Runtime | None = None,
        disk: Disk | None = None,
        markers: bool = False,
    ) -> None:
        if markers and ledger is not None:
            raise Mistake("a channel has a ledger or marker files, not both")
        self.name, self.run = channel, run
        self.layout = Layout(str(Path(root).absolute()), channel)
        self.disk = disk or LocalDisk()
        # Without a ledger nothing ever asks for one.
        self.runtime = runtime or LiveRuntime(cast(Ledger, ledger))
        self._simulated = runtime is not None
        self.has_disk = runtime is None or disk is not None
        """Whether there are files: a simulation of the book alone has none."""
        self.has_ledger = not markers and (ledger is not None or runtime is not None)
        self.keys = Keys(check_name("run", run), channel)

    @property
    def timeouts(self) -> Timeouts:
        """The times that hold here: the ledger's."""
        return self.runtime.ledger.timeouts if self.has_ledger else DEFAULTS

    @property
    def ledger_url(self) -> str | None:
        """What leads others to the same ledger; None without one, empty if nobody knows."""
        return self.runtime.ledger.url if self.has_ledger else None

    def book(
        self,
        name: str,
        guards: Sequence[Compare] = (),
        *,
        sweep_foreign: bool = False,
        reading: bool = False,
    ) -> Book:
        """The authority over this channel, as `name` uses it. The rest is for marker files."""
        if self.has_ledger:
            return LedgerBook(self.runtime, self.keys, name, guards)
        if guards:
            raise Mistake(f"{name}: marker files cannot compare guards; use a ledger")
        place = (self.runtime, self.disk, self.layout, name)
        return MarkerBook(*place, sweep_foreign=sweep_foreign, reading=reading)

    def warn(self, text: str, *args: object) -> None:
        """Say something to people, in the log "holdfast"; a simulation has none."""
        if not self._simulated:
            LOG.warning(text, *args)

    def wall_s(self) -> float:
        """What people's clocks say; in a simulation, its own."""
        return self.runtime.now() if self._simulated else time.time()

    async def make(self) -> None:
        """Make the channel's folders, so that they outlive a loss of power."""
        for path in self.layout.folders():
            await self.disk.make(path)
        above = self.layout.hidden
        while True:
            # A folder that cannot be opened was not made by us.
            with contextlib.suppress(PermissionError):
                async with await self.disk.folder(above or "/") as folder:
                    await folder.sync()
            if not above:
                return
            above = above.rpartition("/")[0]

    async def sync_base(self) -> None:
        """Make the names of the versions durable."""
        async with await self.disk.folder(self.layout.base) as base:
            await base.sync()
