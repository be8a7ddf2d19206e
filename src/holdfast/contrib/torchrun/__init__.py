"""`torchrun --rdzv-backend holdfast`: torch's own agent, our rendezvous.

torch finds `handlers` through the entry-point group `torchrun.handlers`. It does so in every
process that imports torch's elastic package, whichever back end is used, so that nothing else is
imported before a handler is asked for. Only this package imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = ["BACKEND", "handlers"]

BACKEND = "holdfast"


def handlers() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes a handler from torchrun's parameters."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from holdfast.contrib.torchrun.handler import HoldfastHandler
    from holdfast.contrib.torchrun.options import parse

    return HoldfastHandler(parse(params))
