"""Sessions, and questions about what there is."""

from typing import Any

import msgspec

from holdfast.errors import TooLarge
from holdfast.trainer.wire.body import Id, Path, decode

__all__ = ["NewSession", "OfModel", "OfSession", "OfWeights", "create_session", "metadata"]

_MAX_ENTRIES = 64
_MAX_CHARS = 4096


class NewSession(msgspec.Struct, frozen=True):
    """A client that introduces itself."""

    tags: list[str] = []
    sdk_version: str = ""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class OfSession(msgspec.Struct):
    """`session_heartbeat`."""

    session_id: Id


class OfModel(msgspec.Struct):
    """`get_info` and `unload_model`."""

    model_id: Id


class OfWeights(msgspec.Struct):
    """`weights_info`."""

    tinker_path: Path


def create_session(body: bytes) -> NewSession:
    """A request to `create_session`."""
    ask = decode(body, NewSession)
    said = [*ask.tags, ask.sdk_version, ask.display_name or ""]
    if len(ask.tags) > _MAX_ENTRIES or sum(map(len, said)) > _MAX_CHARS:
        raise TooLarge("`tags`, `sdk_version` and `display_name` are too long")
    metadata(ask.user_metadata)
    return ask


def metadata(given: dict[str, Any] | None) -> dict[str, str]:
    """A user's notes. Values that are not text are kept as JSON."""
    said = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (given or {}).items()
    }
    chars = sum(len(key) + len(value) for key, value in said.items())
    if len(said) > _MAX_ENTRIES or chars > _MAX_CHARS:
        raise TooLarge(
            f"`user_metadata` has more than {_MAX_ENTRIES} entries or {_MAX_CHARS} characters"
        )
    return said
