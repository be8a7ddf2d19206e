"""A trainer of several nodes on one machine: the ranks' agents, and spares that wait to step in.

Each node is `holdfast launch` with one worker. A node that dies costs one cycle: a spare, whose
interpreter has everything imported, takes its rank, and the node is started again as a spare.
"""

from collections.abc import Sequence

from holdfast.proc.forkserver import inherit
from holdfast.proc.supervisor import Part, Supervisor

__all__ = ["keep"]


def keep(commands: Sequence[Sequence[str]], grace_s: float = 5.0) -> int:
    """Keep nodes alive until one of them ends by itself, or a signal comes; returns its code."""
    forks = inherit()
    if forks is not None:
        forks.wait(1.0)
    ended = [0]

    def died(_part: Part, code: int) -> bool:
        if code >= 0:
            ended.append(code)
        return code >= 0

    parts = [Part(f"node {at}", argv, forks=forks) for at, argv in enumerate(commands)]
    try:
        Supervisor(parts, died=died, end_s=grace_s).run()
        return ended[-1]
    finally:
        if forks is not None:
            forks.close()
