"""Paths of saved weights: `tinker://MODEL/weights/NAME`. Pure; no path of a file system."""

from holdfast.errors import Mistake
from holdfast.trainer.records import check_name

__all__ = ["FOLDERS", "SAMPLER", "STATE", "adapter", "parse", "unparse"]

STATE = "weights"
SAMPLER = "sampler_weights"
FOLDERS = (STATE, SAMPLER)
_SCHEME = "tinker://"
_MAX_CHARS = 300


def parse(path: str) -> tuple[str, str, str]:
    """Model, folder and name of a path, or `Mistake`."""
    parts = path.removeprefix(_SCHEME).split("/") if path.startswith(_SCHEME) else []
    if len(path) > _MAX_CHARS or len(parts) != 3 or parts[1] not in FOLDERS:
        raise Mistake(
            f"{path[:_MAX_CHARS]!r} is not a path of saved weights: "
            f"{_SCHEME}MODEL/{STATE}/NAME or {_SCHEME}MODEL/{SAMPLER}/NAME"
        )
    return check_name("model", parts[0]), parts[1], check_name("save", parts[2])


def adapter(path: str, owner: str) -> str:
    """The path or the name that an adapter was saved under.

    Fireworks' client names a model of an account. Its owner's are those that were saved here.
    """
    name = path.removeprefix(f"accounts/{owner}/models/")
    if path.startswith(_SCHEME) or "/" not in name:
        return name
    raise Mistake(
        f"{path[:_MAX_CHARS]!r} is no adapter that was saved here: give {_SCHEME}MODEL/{SAMPLER}/"
        f"NAME, accounts/{owner}/models/NAME or the name alone; files and buckets are not read"
    )


def unparse(model: str, folder: str, name: str) -> str:
    """The path of what was saved."""
    return f"{_SCHEME}{model}/{folder}/{name}"
