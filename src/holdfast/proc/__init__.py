"""Processes: started, watched, started again, ended. Nothing outside this package starts one."""

from holdfast.proc.child import Child, Forked, die_with_parent, spawn
from holdfast.proc.ports import HeldPort

__all__ = ["Child", "Forked", "HeldPort", "die_with_parent", "spawn"]
