"""Where things lie in a channel's folder, and which names count.

    <root>/<channel>/
      step_42/                      a version: shards, manifest, STABLE
      .holdfast/drafts/e7-43-1f3a/  being written by the publisher with epoch 7
      .holdfast/trash/42-9b2c/      given up, being removed
      .holdfast/staging/r0-815/     hard links for a reader that opens paths itself
      .holdfast/consumers/r0-1f3a/  without a ledger: one life of a consumer; see markers.py
      .holdfast/swept/42            without a ledger: the hash of a deleted version
      .holdfast/marks/42            without a ledger: found damaged
      .holdfast/reserve             without a ledger: room for giving something up on a full disk
      .holdfast/writers/7           without a ledger: who took over publishing, with epoch 7

Names from outside (channel, consumer) become parts of paths only after `check_name`.
A temporary folder's name is never mistaken for a version: `number` takes `step_` followed
by a plain number and nothing else.
"""

import re

from holdfast.errors import Mistake

__all__ = ["MAX_VERSION", "Layout", "check_name", "epoch_of", "number", "version_folder"]

MAX_VERSION = 10**12 - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_VERSION = re.compile(r"step_(0|[1-9][0-9]{0,11})")
_DRAFT = re.compile(r"e([0-9]+)-[0-9]+-[0-9a-f]+")


def check_name(what: str, name: str) -> str:
    """Refuse a name that could lead out of its folder."""
    if not _NAME.fullmatch(name):
        raise Mistake(
            f"{name!r} cannot be the name of a {what}: use letters, digits, '.', '_' and '-', "
            "beginning with a letter or a digit, at most 200 of them"
        )
    return name


def check_version(number: int) -> int:
    """Refuse what is not a version number."""
    if type(number) is not int or not 0 <= number <= MAX_VERSION:
        raise Mistake(f"a version is a number from 0 to {MAX_VERSION}, not {number!r}")
    return number


def version_folder(number: int) -> str:
    """The name of a version's folder."""
    return f"step_{number}"


def number(name: str) -> int | None:
    """The version that a folder's name stands for, or None."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else None


def epoch_of(name: str) -> int | None:
    """The epoch in the name of a temporary folder, or None."""
    match = _DRAFT.fullmatch(name)
    return int(match[1]) if match else None


class Layout:
    """The paths of one channel."""

    def __init__(self, root: str, channel: str) -> None:
        self.base = f"{root.rstrip('/') or '/'}/{check_name('channel', channel)}"
        self.hidden = f"{self.base}/.holdfast"
        self.drafts = f"{self.hidden}/drafts"
        self.trash = f"{self.hidden}/trash"
        self.staging = f"{self.hidden}/staging"
        self.consumers = f"{self.hidden}/consumers"
        self.swept = f"{self.hidden}/swept"
        self.marks = f"{self.hidden}/marks"
        self.writers = f"{self.hidden}/writers"

    def folders(self) -> tuple[str, ...]:
        """The folders that must be there before anything is done."""
        shared = (self.base, self.drafts, self.trash, self.staging)
        return (*shared, self.consumers, self.swept, self.marks, self.writers)

    def version(self, number: int) -> str:
        """The folder of a version."""
        return f"{self.base}/{version_folder(number)}"

    def draft(self, epoch: int, number: int, nonce: str) -> str:
        """A temporary folder that nobody else writes into."""
        return f"{self.drafts}/e{epoch}-{number}-{nonce}"

    def rubbish(self, number: int | None, nonce: str) -> str:
        """Where a deleted version, or anything else (None), goes before it is removed."""
        return f"{self.trash}/{'old' if number is None else number}-{nonce}"
