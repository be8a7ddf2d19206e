"""`.holdfast/channel.json`: what a channel's folder says about itself to people's tools.

Whoever has only the folder learns from it which ledger and run it belongs to and what its
publisher means to keep. It is a hint and carries no authority: nothing that publishes, loads
or sweeps by itself decides by it (who comes with the other kind of book is refused, that is
all), and a publisher that was replaced may have written it last.
Passwords are never in it.
"""

import contextlib
from typing import Any

import msgspec
from pydantic import ValidationError

from holdfast.errors import Corrupt, Mistake, TooNew
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Disk
from holdfast.weights.policy import Retention

__all__ = ["ABOUT", "About", "check_book", "read", "write"]

ABOUT = "channel.json"
MAX_ABOUT_BYTES = 1 << 20
SCHEMA = 1


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says. A reader ignores what a newer writer has added."""

    schema: int = SCHEMA
    run: str
    channel: str
    folder: str
    """The channel's folder as its publisher sees it; a copy of the folder is told by it."""
    ledger: str | None
    """Its URL without a password; None: marker files; empty: the publisher did not know."""
    retention: dict[str, Any] | None = None

    def policy(self) -> Retention | None:
        """What the publisher keeps, or None when that is not known."""
        if self.retention is None:
            return None
        known = {
            name: value for name, value in self.retention.items() if name in Retention.model_fields
        }
        try:
            return Retention.model_validate(known)
        except ValidationError:
            return None


async def read(disk: Disk, hidden: str) -> About | None:
    """What the folder `hidden` (`<channel>/.holdfast`) says, or None when it says nothing."""
    try:
        async with await disk.folder(hidden) as folder:
            raw = await folder.read(ABOUT, MAX_ABOUT_BYTES)
    except FileNotFoundError:
        return None
    try:
        about = msgspec.json.decode(raw, type=About)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(
            f"{hidden}/{ABOUT} cannot be read ({error}): the next publisher writes it anew"
        ) from error
    if about.schema > SCHEMA:
        raise TooNew(
            f"{hidden}/{ABOUT} has schema {about.schema}, this Holdfast knows {SCHEMA}: "
            "use a newer one"
        )
    return about


async def check_book(channel: Channel) -> None:
    """Raise `Mistake` when the folder is kept with a ledger and we have none, or vice versa.

    To the other kind of book everything here belongs to nobody, and a pin in it holds nothing.
    """
    said = None
    with contextlib.suppress(Corrupt, TooNew):
        said = await read(channel.disk, channel.layout.hidden)
    if said is not None and (said.ledger is None) == channel.has_ledger:
        here = "marker files" if said.ledger is None else f"the ledger {said.ledger}".rstrip()
        raise Mistake(f"{channel.layout.base} is kept with {here}, and a folder has one book")


async def write(channel: Channel, retention: Retention) -> None:
    """Write the file if it does not say all this already."""
    about = About(
        run=channel.run,
        channel=channel.name,
        folder=channel.layout.base,
        ledger=channel.ledger_url,
        retention=retention.model_dump(mode="json"),
    )
    hidden = channel.layout.hidden
    with contextlib.suppress(Corrupt, TooNew):
        if await read(channel.disk, hidden) == about:
            return
    raw = msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n"
    async with await channel.disk.folder(hidden) as folder:
        await folder.put(ABOUT, raw)
