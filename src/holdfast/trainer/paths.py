"""Paths of saved weights: `tinker://MODEL/weights/NAME`. Pure; no path of a file system."""

from holdfast.errors import Mistake
from holdfast.trainer.records import check_name

__all__ = ["SAMPLER", "STATE", "parse", "unparse"]

STATE = "weights"
SAMPLER = "sampler_weights"
_SCHEME = "tinker://"
_MAX_CHARS = 300


def parse(path: str) -> tuple[str, str, str]:
    """Model, folder and name of a path, or `Mistake`."""
    parts = path.removeprefix(_SCHEME).split("/") if path.startswith(_SCHEME) else []
    if len(path) > _MAX_CHARS or len(parts) != 3 or parts[1] not in (STATE, SAMPLER):
        raise Mistake(
            f"{path[:_MAX_CHARS]!r} is not a path of saved weights: "
            f"{_SCHEME}MODEL/{STATE}/NAME or {_SCHEME}MODEL/{SAMPLER}/NAME"
        )
    return check_name("model", parts[0]), parts[1], check_name("save", parts[2])


def unparse(model: str, folder: str, name: str) -> str:
    """The path of what was saved."""
    return f"{_SCHEME}{model}/{folder}/{name}"
