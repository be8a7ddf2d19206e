"""Says whether Holdfast's promises held in a run, from nothing but its event logs.

It shares no code with what it checks, but for the tree of errors: `schema.py` says how it
understands events, `reading.py` reads them, each file in `rules/` holds the rules of one promise
with what they rely on, and `report.py` puts together what they say.

A rule must never accuse a run for having been killed: many events are written right after the
moment they tell of, and a process may die between the two. Where a missing event has such an
explanation, a rule says so in a note.
"""

from holdfast.check.report import Report, check_run

__all__ = ["Report", "check_run"]
