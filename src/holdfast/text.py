"""Sizes, times and tables for people. Pure.

Text that others have written (a replica's address, its problem) goes through `clean` before
it reaches a terminal.
"""

import re
from collections.abc import Sequence

from holdfast.errors import Mistake

__all__ = ["age", "clean", "numbers", "parse_bytes", "plural", "several", "size", "table"]

_UNITS = "KMGTP"
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([KMGTP])(iB|B)?|B)?", re.IGNORECASE)


def size(count: int) -> str:
    """Bytes as people read them."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}iB"


def parse_bytes(text: str) -> int:
    """Bytes from 512, 10G or 10GiB (1024 each step), or 10GB (1000 each step)."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise Mistake(f"{text!r} is not a number of bytes such as 500M, 10G or 2GB")
    number, unit, suffix = match.groups()
    if unit is None:
        return int(float(number))
    step = 1000 if suffix is not None and suffix.upper() == "B" else 1024
    return int(float(number) * step ** (_UNITS.index(unit.upper()) + 1))


def age(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def numbers(found: Sequence[int]) -> str:
    """Version numbers in a line, the middle left out if there are many."""
    if len(found) <= 6:
        return ", ".join(map(str, found))
    return f"{', '.join(map(str, found[:3]))} … {found[-1]} ({len(found)})"


def plural(count: int, noun: str) -> str:
    """So many of something."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def several(found: Sequence[str], most: int, between: str = ", ", last: str = " and ") -> str:
    """The first of these, and how many more there are."""
    more = f"{last}{len(found) - most} more" if len(found) > most else ""
    return between.join(found[:most]) + more


def clean(text: str, limit: int = 200) -> str:
    """Text that cannot move the cursor or fill the screen."""
    flat = "".join(letter if letter.isprintable() else " " for letter in text)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """Lines with aligned columns; `right` has an 'r' for each column that goes to the right.

    An empty cell becomes '-'; a column that is empty in every row is left out.
    """
    used = [at for at in range(len(heads)) if not rows or any(row[at] for row in rows)]
    lines = [[heads[at] for at in used], *([row[at] or "-" for at in used] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(used))]
    sides = [right[at : at + 1] == "r" for at in used]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    ]
