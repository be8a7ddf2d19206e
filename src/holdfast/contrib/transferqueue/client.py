"""The storage client: TransferQueue's keys and values in a store of ours.

What TransferQueue hands over goes through our encoding (`values.py`): tensors, numpy arrays,
text, bytes, numbers, lists, dictionaries. There is no pickle; what cannot be carried is a
`Mistake` that names key and type. Retries are the store's: only keys that failed in transit
or arrived damaged are asked for again.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transfer_queue.storage.clients.base import (  # type: ignore[import-not-found]
    StorageKVClient,
)

from holdfast.contrib.transferqueue.settings import Settings
from holdfast.contrib.transferqueue.tokens import from_token, name, to_token
from holdfast.errors import BatchFailed, HoldfastError, Mistake, NotFound
from holdfast.retry import Partial
from holdfast.transfer.batches import portions
from holdfast.transfer.frame import Ref
from holdfast.transfer.store import failed
from holdfast.transfer.url import connect

__all__ = ["HoldfastStorageClient", "in_their_words"]

_DELETED_AT_ONCE = 10_000


class HoldfastStorageClient(StorageKVClient):  # type: ignore[misc]
    """Puts, gets and deletes values. May be used from several threads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = Settings.read(config)
        if not self.settings.run:
            raise Mistake("this back end is started by tq.init, which gives the run its name")
        self.store = connect(self.settings.url, self.settings.policy)

    def put(self, keys: list[str], values: list[Any]) -> list[str]:
        """Store values under names of their own; return a token for each.

        All of them or none: when some could not be put, the others are deleted again.
        """
        generation = self.store.generation()
        wanted = {name(self.settings.run, key, generation): key for key in keys}
        if len(wanted) != len(keys) or len(keys) != len(values):
            raise Mistake(
                f"{len(values)} values for {len(keys)} keys, {len(wanted)} of them different: "
                "every key has one value in a put"
            )
        try:
            refs = self.store.put(dict(zip(wanted, values, strict=True)), generation=generation)
        except HoldfastError as error:
            if isinstance(error, BatchFailed):
                self.forget(error.values.values())
            raise in_their_words(error, wanted) from error
        return [to_token(refs[one]) for one in wanted]

    def get(
        self,
        keys: list[str],
        shapes: Any = None,  # noqa: ARG002 -- a value says itself what it is
        dtypes: Any = None,  # noqa: ARG002
        custom_backend_meta: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The values that these tokens mean, in the order of the keys.

        A key without a token was never published, so it has no value.
        """
        tokens = custom_backend_meta or [None] * len(keys)
        never = {
            key: NotFound(f"{key}: nothing has been published under it", key=key)
            for key, token in zip(keys, tokens, strict=True)
            if token is None
        }
        if never:
            raise BatchFailed(
                f"{len(never)} of {len(keys)} keys have no value yet, or no longer: "
                f"{', '.join(list(never)[:5])}",
                failures=never,
            )
        refs = [from_token(key, token) for key, token in zip(keys, tokens, strict=True)]
        try:
            values = self.store.get(refs)
        except HoldfastError as error:
            names = {ref.key: key for ref, key in zip(refs, keys, strict=True)}
            raise in_their_words(error, names) from error
        return [values[ref.key] for ref in refs]

    def clear(self, keys: list[str], custom_backend_meta: Sequence[Any] | None = None) -> None:
        """Delete the values that these tokens mean, and nothing else.

        What is gone already, or was never published, is no error.
        """
        tokens = custom_backend_meta or [None] * len(keys)
        self.delete(
            from_token(key, token)
            for key, token in zip(keys, tokens, strict=True)
            if token is not None
        )

    def delete(self, refs: Iterable[Ref]) -> None:
        """Delete exactly these values."""
        self.store.delete(refs)

    def forget(self, refs: Iterable[Ref]) -> None:
        """Delete what nobody will ask for; if that fails, it stays until the run ends."""
        with contextlib.suppress(HoldfastError):
            self.delete(refs)

    def sweep(self, prefix: str) -> None:
        """Delete everything whose name begins so."""
        for some in portions([found.key for found in self.store.scan(prefix)], _DELETED_AT_ONCE):
            self.store.delete(some)

    def close(self) -> None:
        """Let go of the store."""
        self.store.close()


def in_their_words(error: HoldfastError, names: Mapping[str, str]) -> HoldfastError:
    """The same error with TransferQueue's keys (INDEX@FIELD) for the names in the store."""
    if isinstance(error, BatchFailed):
        failures = {
            names.get(name, name): _in_their_words(why, name, names)
            for name, why in error.failures.items()
        }
        values = {names.get(name, name): value for name, value in error.values.items()}
        return failed(Partial(values, failures), len(names))
    renamed: HoldfastError = _in_their_words(error, error.key or "", names)
    return renamed


def _in_their_words(error: Any, name: str, names: Mapping[str, str]) -> Any:
    if not isinstance(error, HoldfastError) or name not in names:
        return error
    return type(error)(str(error).replace(name, names[name]), key=names[name])
