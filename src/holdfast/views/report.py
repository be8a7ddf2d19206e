"""The report of a run: the page with its data inside, in one file that needs nothing else."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.files import write_private
from holdfast.views.page import page
from holdfast.views.picture import Picture
from holdfast.views.snapshot import snapshot, summary
from holdfast.views.tail import look

__all__ = ["summary", "write_report"]

_MAX_FACTS_BYTES = 1 << 20


def write_report(
    folder: Path, picture: Picture | None = None, *, points: Iterable[str] = ()
) -> Path:
    """Write `report.html` into the run's folder, whole or not at all, and give its path.

    The picture is read from the folder's logs if it is not given. `points` are the fault points
    that the run has, to tell at which of them no fault was aimed.
    """
    picture = look(folder) if picture is None else picture
    data = snapshot(picture)
    data["summary"] = summary(picture)
    data["points"] = picture.points.facts(points)
    data["final"] = _facts(folder / "final.json")
    data["about"] = _facts(folder / "run.json")
    path = folder / "report.html"
    write_private(path, page(data).encode())
    return path


def _facts(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing if it is not there or is not whole."""
    try:
        if path.stat().st_size > _MAX_FACTS_BYTES:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return {}
