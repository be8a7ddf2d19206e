"""Broken on purpose: one rule is left out in each, and the simulator must catch every one."""

from collections.abc import Callable

BROKEN: dict[str, Callable[[], object]] = {}
