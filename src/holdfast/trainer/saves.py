"""What was saved under a name: how it is found, changed and deleted.

- A deletion is recorded first; from then on nobody finds the weights. Then the vault gives their
  version and their files up, and the record goes last. A trainer that dies in between leaves the
  record, and its successor ends the deletion (`tidy`): files and record go together.
- Whether weights are there is decided here, by the records, and never by what is still in memory
  or on the disk: the answer is the same before and after a restart.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.errors import Mistake, NotFound, Retriable, UnknownOutcome
from holdfast.ledger.records import put
from holdfast.ledger.types import Delete
from holdfast.trainer.journal import Journal, Write
from holdfast.trainer.paths import FOLDERS, STATE, parse, unparse
from holdfast.trainer.records import Save, check_name
from holdfast.trainer.seams import Vault
from holdfast.trainer.state import channel_of, saved_in

__all__ = ["Saves", "Tell", "Where"]

Where = tuple[str, str, str]
"""Model, folder and name."""
Tell = Callable[[str, Save, str | None], Sequence[Write]]
"""What to record elsewhere of a save: its path, its record and its hash; None: it is deleted."""


class Saves(dict[Where, Save]):
    """Everything that was saved and not deleted."""

    def __init__(
        self, journal: Journal, vault: Vault, wall: Callable[[], float], tell: Tell
    ) -> None:
        super().__init__()
        self._journal = journal
        self._keys = journal.keys
        self._vault = vault
        self._wall = wall
        self.tell = tell
        self._deleted: dict[Where, Save] = {}
        """Deleted, and their files may still be there."""

    def open(self, recorded: Mapping[Where, Save]) -> None:
        """Go on from what the ledger has."""
        for where, save in recorded.items():
            (self._deleted if save.deleted else self)[where] = save

    def find(
        self, path: str, model: str = "", folders: Sequence[str] = (STATE,)
    ) -> tuple[Where, Save]:
        """What was saved there, and where that is.

        Fireworks' client gives a name alone: it means this model's, or else the newest of it.
        """
        if "://" in path:
            wheres = [parse(path)]
        else:
            check_name("save", path)
            wheres = [one for one in self if one[1] in folders and one[2] == path]
            wheres.sort(key=lambda one: (one[0] == model, self[one].created_at))
        if not wheres:
            raise NotFound(f"nothing was saved as {path[:200]}")
        return wheres[-1], self.at(wheres[-1])

    def named(self, model: str, checkpoint: Sequence[str]) -> Where:
        """Where a checkpoint of a model is: `[folder, name]`, or `[name]` if that is but one."""
        if len(checkpoint) == 2:
            return model, checkpoint[0], checkpoint[1]
        name = "/".join(checkpoint)
        there = [(model, folder, name) for folder in FOLDERS if (model, folder, name) in self]
        if len(there) > 1:
            both = " and ".join(unparse(*where) for where in there)
            raise Mistake(f"there are {both}: say which, with the folder before the name")
        if not there:
            raise NotFound(f"{model[:80]} has no checkpoint {name[:200]!r}")
        return there[0]

    def at(self, where: Where) -> Save:
        """What was saved there; `NotFound` when it was deleted, or when its time has run out."""
        save = self.get(where)
        if save is None:
            raise NotFound(f"nothing was saved as {unparse(*where)[:200]}, or it was deleted")
        if self._is_over(save):
            raise NotFound(f"{unparse(*where)[:200]} is gone: its time to live has run out")
        return save

    def check_kept(self, channel: str, version: int) -> None:
        """Refuse weights that were saved under a name and are no longer there."""
        where = saved_in(channel)
        if where is not None and self.at(where).version != version:
            raise Mistake(f"{unparse(*where)} was deleted or overwritten since")

    def _is_over(self, save: Save) -> bool:
        return 0 < save.expires_at <= self._wall()

    # ---- changing --------------------------------------------------------------

    async def change(self, where: Where, **changes: float) -> None:
        """Record that it is `public`, or not, or until when it is kept (`expires_at`, 0: ever)."""
        save = self[where] = msgspec.structs.replace(self.at(where), **changes)
        await self._journal.write(put(self._keys.save(*where), save))

    async def delete(self, where: Where) -> None:
        """Delete what was saved. Its name may be used again."""
        save = self.at(where)
        await self._delete(where, save)
        await self._remove(where)

    async def _delete(self, where: Where, save: Save) -> None:
        del self[where]
        deleted = self._deleted[where] = msgspec.structs.replace(save, deleted=True)
        told = self.tell(unparse(*where), save, None)
        await self._journal.write(put(self._keys.save(*where), deleted), *told)

    async def _remove(self, where: Where) -> None:
        """Remove files, then the record."""
        save = self._deleted.get(where)
        if save is None:
            return
        try:
            await self._vault.drop(channel_of(*where), save.version)
        except (Retriable, UnknownOutcome):
            return  # `tidy` tries it again
        if self._deleted.get(where) is not save:
            return  # saved and deleted again meanwhile
        del self._deleted[where]
        if where not in self:  # else the record is that of new weights
            await self._journal.write(Delete(self._keys.save(*where)))

    async def tidy(self) -> None:
        """Delete what is over, and end deletions that a dead trainer has begun."""
        for where, save in list(self.items()):
            if self._is_over(save) and self.get(where) is save:
                await self._delete(where, save)
        for where in list(self._deleted):
            await self._remove(where)
