"""The times that protocols are simulated with: one table, whose rules hold as in production.

Production's own, but for what would keep a schedule waiting for nothing. A lease is shorter than
most pauses of `faults.py`, and longer than most messages take.
"""

from holdfast.timeouts import Timeouts

__all__ = ["TIMES"]

TIMES = Timeouts(
    consumer_lease_s=6.0,
    node_lease_s=10.0,
    host_lease_s=6.0,
    fleet_hold_s=12.0,
    submit_wait_s=3.0,
    poll_hold_s=6.0,
    sdk_poll_s=30.0,
    client_connect_s=5.0,
    client_call_s=10.0,
    vllm_answer_s=20.0,
    replica_call_s=30.0,
)
TIMES.check()
