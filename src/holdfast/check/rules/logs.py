"""What all other rules rest on: the logs are whole.

Relied upon: a line is one write; a life that begins cuts off what its predecessor left torn; `seq`
counts from 1 in every life, and what was dropped for want of room is told as `events.dropped`. Of
a log whose oldest files were dropped, counting begins with what is left.
What a life had not written yet when it was killed (a full disk) leaves no trace.
"""

from holdfast.check.history import SLACK_S, Entry, History, Life
from holdfast.check.schema import LinesDropped, Record
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]


@rule("logs.lines", 0, "every line but the last is a whole event")
def lines(history: History, result: Result) -> None:
    """Tell what could not be read."""
    result.checked = len(history.entries) + len(history.flaws)
    for flaw in history.flaws:
        result.find(flaw.reason, flaw)


@rule("logs.seq", 0, "no event is missing that was not told as dropped")
def seq(history: History, result: Result) -> None:
    """Count along every life; lines that could not be read count as what they stand for."""
    torn = {flaw.place for flaw in history.flaws}
    expected: dict[Life, int] = {}
    last: dict[str, Entry[Record]] = {}
    for one in history.entries:
        result.checked += 1
        event = one.event
        is_cut = one.file in history.cut and one.life.index == 1
        due = expected.get(one.life, event.seq if is_cut else 1)
        before = last.get(one.file)
        since = before.line if before else 0
        unread = sum(f"{one.file}:{at}" in torn for at in range(since + 1, one.line))
        if not due <= event.seq <= due + unread:
            result.find(f"event {event.seq} where {due} was due", one)
        size = event.count if isinstance(event, LinesDropped) else 1
        expected[one.life] = event.seq + size
        last[one.file] = one


@rule("logs.clock", 0, "within a life the clock does not go back")
def clock(history: History, result: Result) -> None:
    """Compare the time of every event with the latest before it, in one life."""
    latest: dict[Life, Entry[Record]] = {}
    for one in history.entries:
        result.checked += 1
        before = latest.setdefault(one.life, one)
        back_s = before.event.at - one.event.at
        if back_s > SLACK_S:
            result.find(f"the clock went back by {back_s:.1f} s", before, one)
        if back_s < 0 or back_s > SLACK_S:
            latest[one.life] = one


RULES = (lines, seq, clock)
