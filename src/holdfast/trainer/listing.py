"""What there is: training runs, checkpoints and sessions, as Tinker's REST client lists them.

Pure functions of what the core holds.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from holdfast.trainer.paths import STATE, unparse
from holdfast.trainer.records import Save
from holdfast.trainer.state import State

__all__ = ["Where", "checkpoints", "page", "session", "training_run"]

Where = tuple[str, str, str]
_MAX_PAGE = 1000


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def checkpoint(where: Where, save: Save) -> dict[str, Any]:
    """One thing that was saved."""
    _, folder, name = where
    return {
        "checkpoint_id": f"{folder}/{name}",
        "checkpoint_type": "training" if folder == STATE else "sampler",
        "time": _time(save.created_at),
        "tinker_path": unparse(*where),
        "size_bytes": save.bytes,
        "public": save.public,
        "expires_at": _time(save.expires_at) if save.expires_at else None,
        "user_metadata": save.metadata or None,
    }


def checkpoints(saves: Mapping[Where, Save], model: str | None = None) -> list[dict[str, Any]]:
    """Everything that was saved, or one model's, newest first."""
    chosen = [it for it in saves.items() if model is None or it[0][0] == model]
    chosen.sort(key=lambda it: (-it[1].created_at, it[0]))
    return [checkpoint(where, save) for where, save in chosen]


def training_run(state: State, saves: Mapping[Where, Save], owner: str) -> dict[str, Any]:
    """One model."""
    model = state.model
    assert model is not None
    mine = checkpoints(saves, state.name)
    last: dict[str, Any] = {}
    for one in mine:
        last.setdefault(one["checkpoint_type"], one)
    results = state.line.results.values()
    return {
        "training_run_id": state.name,
        "base_model": model.base,
        "model_owner": owner,
        "is_lora": model.lora is not None,
        "lora_rank": model.lora.rank if model.lora else None,
        "corrupted": False,
        "last_request_time": _time(max((one.at for one in results), default=model.created_at)),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": model.metadata or None,
    }


def session(name: str, lines: Iterable[State]) -> dict[str, Any]:
    """What belongs to a session."""
    mine = [state for state in lines if state.session == name]
    return {
        "training_run_ids": [state.name for state in mine if state.model],
        "sampler_ids": [state.name for state in mine if state.sampler],
    }


def page(items: list[Any], query: Mapping[str, str]) -> tuple[list[Any], dict[str, int]]:
    """A part of a list, and where it is."""
    limit = _number(query.get("limit"), 20, _MAX_PAGE)
    offset = _number(query.get("offset"), 0, len(items))
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _number(text: str | None, default: int, most: int) -> int:
    return min(int(text), most) if text and text.isdecimal() and len(text) < 10 else default
