"""The picture as something that rich can draw. Pure.

Text that others have written is `clean` and never read as markup.
"""

import itertools
import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.text import age, clean, plural
from holdfast.views.members import Member, signal_name
from holdfast.views.picture import NOISE, Picture
from holdfast.views.snapshot import summary

__all__ = ["draw", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_STATES = {"up": "green", "down": "bold red", "ended": "dim"}


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Numbers as a line of bars, the lowest at the bottom; the newest are at its right."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    if len(values) > width:  # the mean of each piece
        cuts = [round(at * len(values) / width) for at in range(width + 1)]
        pieces = [values[a:b] for a, b in itertools.pairwise(cuts)]
        values = [sum(piece) / len(piece) for piece in pieces]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def draw(picture: Picture, height: int = 40) -> RenderableType:
    """The whole picture, for a terminal of so many lines."""
    parts: list[RenderableType] = [_head(picture), _curves(picture), _members(picture)]
    faults, events = _faults(picture), max(3, min(10, height - 22 - len(picture.members.known)))
    if faults is not None:
        parts.append(faults)
    parts.append(_events(picture, events))
    return Panel(
        Group(*parts), title=Text(clean(f"holdfast run {picture.run}", 60)), title_align="left"
    )


def _head(picture: Picture) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(width=30)
    line.add_column(no_wrap=True)
    took = (picture.ended or picture.now) - (picture.began or picture.now)
    state = picture.how or ("running" if picture.began else "waiting for its first event")
    line.add_row(
        Text(f"step {picture.step}/{picture.steps}", "bold"),
        ProgressBar(total=max(1, picture.steps), completed=picture.step, width=30),
        Text(f"{clean(state, 40)}, {age(took)}, {picture.faults.pace_s():.2f} s a step"),
    )
    return line


def _curves(picture: Picture) -> RenderableType:
    train, held = picture.train.points(), picture.evals.points()
    rows: list[tuple[str, list[float], str]] = [
        ("reward", [point[1] for point in train], ".2f"),
        ("exact", [point[2] for point in train], ".2f"),
        ("eval", [point[1] for point in held], ".2f"),
        ("loss", [point[3] for point in train], "+.3f"),
    ]
    table = Table.grid(padding=(0, 1))
    for name, values, form in rows:
        last = format(values[-1], form) if values else "-"
        table.add_row(Text(name, "dim"), Text(sparkline(values), "cyan"), Text(last, "bold"))
    serving = picture.serving()
    newest = picture.version if picture.version is not None else "-"
    served = ", ".join(f"{name}: {version}" for name, version in serving.items()) or "nobody"
    table.add_row(Text("version", "dim"), Text(clean(f"{newest}; served by {served}", 100)))
    queue = f"{picture.queue} samples wait, {picture.acknowledged} consumed"
    table.add_row(Text("queue", "dim"), Text(queue))
    return table


def _members(picture: Picture) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(head, "dim") for head in ("member", "state", "pid", "up", "deaths", "")))
    for member in picture.members.sorted()[:20]:
        life = member.life
        table.add_row(
            Text(clean(member.name, 30)),
            Text(member.state, _STATES[member.state]),
            Text(str(life.pid) if life else "-"),
            Text(age(picture.now - life.began) if life else "-"),
            Text(str(member.deaths) if member.deaths else "", "red"),
            Text(_about(member), "dim"),
        )
    spares = [clean(name, 30) for name in picture.spare_nodes()]
    if picture.members.spares:
        spares.append(plural(len(picture.members.spares), "warm interpreter"))
    if spares:
        shown = Text(", ".join(spares), "dim")
        table.add_row(Text("spares"), Text("ready", "green"), Text(""), Text(""), Text(""), shown)
    return table


def _about(member: Member) -> str:
    life = member.lives[-1] if member.lives else None
    if life is None:
        return ""
    if life.how == "stopped":
        return "stopped with others"
    if life.how in ("died", "lost"):
        return f"died ({signal_name(life.code)})"
    return f"back after {life.after_s:.1f} s" if life.after_s is not None else ""


def _faults(picture: Picture) -> RenderableType | None:
    if not picture.faults.total:
        return None
    facts = summary(picture)
    text = Text(f"faults {facts['faults']}, recovered {facts['recoveries']}, ", "bold")
    text.append(f"{facts['seconds_lost']:.1f} s lost: ")
    kinds = [
        f"{kind} ×{each['faults']} ({each['seconds_lost']:.1f} s)"
        for kind, each in facts["lost_by_kind"].items()
    ]
    text.append(clean(", ".join(kinds), 300))
    return text


def _events(picture: Picture, count: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for width in (9, 16, 22):
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(no_wrap=True, overflow="ellipsis")
    shown = [entry for entry in picture.entries() if entry.kind not in NOISE]
    for entry in shown[-count:]:
        since = entry.at - (picture.began or entry.at)
        table.add_row(
            Text(f"{since:7.1f} s", "dim"),
            Text(clean(entry.process, 16)),
            Text(clean(entry.kind, 22), "cyan"),
            Text(clean(entry.text, 120), "dim"),
        )
    return table
