"""Rendezvous: cycles, ranks, spares, on the ledger."""

from holdfast.rendezvous.decide import Clock, View, Wait, decide
from holdfast.rendezvous.records import Cause, Cycle, Keys, Member, Node, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous

__all__ = [
    "Cause",
    "Clock",
    "Cycle",
    "Keys",
    "Member",
    "Node",
    "Place",
    "Rendezvous",
    "Rules",
    "View",
    "Wait",
    "decide",
]
