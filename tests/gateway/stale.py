"""`holdfast` with gateways that hear of changes late, and may believe what they last heard.

    python -m gateway.stale serve ...     `holdfast serve`, with such gateways
    python -m gateway.stale               one of these gateways

STALE_LAG_S: how late they hear of a change, at most. STALE_NAIVE: they believe their table.
"""

import os
import random
import sys

from holdfast import cli
from holdfast.gateway import commands, process
from holdfast.gateway.desk import Desk
from holdfast.jobs.store import Jobs
from holdfast.sim.protocols.routes.others import LateRoutes, NaiveDesk


def _late(jobs: Jobs) -> LateRoutes:
    most_s = float(os.environ["STALE_LAG_S"])
    return LateRoutes(jobs, lambda: random.random() * most_s)


if __name__ == "__main__":
    if sys.argv[1:]:
        commands.GATEWAY = "gateway.stale"
        cli.main()
    else:
        process.main(_late, NaiveDesk if os.environ.get("STALE_NAIVE") else Desk)
