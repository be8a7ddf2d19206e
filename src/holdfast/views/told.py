"""One line of an event log, as the event that it is. Pure.

The events' own classes say which fields there are; the views have no copy of them. An event of
another type, or in a form that this version does not know, is `Unknown`: it is listed, and changes
nothing else.
"""

import contextlib
import functools
import importlib
import math
import re

import msgspec

from holdfast.errors import MissingPackage
from holdfast.events import Event, Unknown, types
from holdfast.text import clean

__all__ = ["kind_of", "known", "parse", "text_of"]

_MODULES = (
    "holdfast.chaos.runs",
    "holdfast.faults",
    "holdfast.jobs.host",
    "holdfast.launch.crew",
    "holdfast.launch.warm",
    "holdfast.launch.workers",
    "holdfast.rollout.happenings",
    "holdfast.run.happenings",
    "holdfast.weights.publisher",
    "holdfast.contrib.fleets.replica",
)
"""Where the events are declared that a picture is made of."""
_TEXT_CHARS = 300
_HASH = re.compile(r"[0-9a-f]{32,128}")
_STAMPS = ("type", "at", "process", "pid", "seq")


class _Stamp(msgspec.Struct):
    type: str
    at: float = 0.0
    process: str = ""
    pid: int = 0
    seq: int = 0


@functools.cache
def known() -> dict[str, type[Event]]:
    """The classes of events, by their types."""
    for module in _MODULES:
        with contextlib.suppress(MissingPackage):  # its events are listed, and that is all
            importlib.import_module(module)
    return types()


def parse(line: bytes) -> Event | None:
    """The event of a line, or None if the line is none."""
    try:
        fields = msgspec.json.decode(line)
        stamp = msgspec.convert(fields, _Stamp)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    if (form := known().get(stamp.type)) is not None:
        # JSON has no NaN: what is none there is NaN again here.
        real = {name: math.nan if value is None else value for name, value in fields.items()}
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(real, form)
    said = {name: value for name, value in fields.items() if name not in _STAMPS}
    return Unknown(
        kind=stamp.type,
        fields=said,
        at=stamp.at,
        process=stamp.process,
        pid=stamp.pid,
        seq=stamp.seq,
    )


def kind_of(event: Event) -> str:
    """The type of an event."""
    return event.kind if isinstance(event, Unknown) else str(event.__struct_config__.tag)


def text_of(event: Event) -> str:
    """Its fields in one line, safe for a terminal; long lists only by their length."""
    fields = event.fields if isinstance(event, Unknown) else msgspec.to_builtins(event)
    said = (f"{name}={_short(one)}" for name, one in fields.items() if name not in _STAMPS)
    return clean("  ".join(said), _TEXT_CHARS)


def _short(value: object) -> str:
    if isinstance(value, str) and _HASH.fullmatch(value):
        return f"{value[:12]}…"
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"[{len(value)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
