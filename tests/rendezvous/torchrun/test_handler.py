"""The handler, called as torch's agent calls it: several nodes as threads, real ledgers.

These are the ideas of torch's own tests of handlers: ranks, restart on a change of membership, a
node that leaves, closing, the state after a shutdown; and what ours adds to them.
"""

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as store_util

from holdfast.contrib.torchrun.handler import HoldfastHandler
from holdfast.errors import Mistake
from holdfast.ledger.records import decode
from holdfast.rendezvous.overview import used_name
from holdfast.rendezvous.probe import ProbeServer
from holdfast.rendezvous.records import Cycle, Node, Rules
from holdfast.servers import EtcdServer
from listening import listeners
from patience import HANG_S, until
from rendezvous.torchrun.conftest import KEYS, Run, behind, meet

BOTH = [(0, 2), (1, 2)]


def ranks(infos: list[RendezvousInfo]) -> list[tuple[int, int]]:
    return sorted((info.rank, info.world_size) for info in infos)


def port(info: RendezvousInfo) -> int:
    """Where the store of a cycle is."""
    assert info.bootstrap_store_info is not None
    found: int = info.bootstrap_store_info.master_port
    return found


def until_told(handler: HoldfastHandler) -> None:
    """Wait until the agent would restart its workers."""
    until(handler.num_nodes_waiting)


def again(back: HoldfastHandler, told: HoldfastHandler) -> list[RendezvousInfo]:
    """The workers of one node have failed; the other hears of it, and both meet again."""
    answer = behind(back.next_rendezvous)
    return rejoin(told, answer)


def rejoin(handler: HoldfastHandler, other: "Future[Any]") -> list[RendezvousInfo]:
    """A node hears that its cycle is over, and meets one that waits already."""
    until_told(handler)
    return [*meet(handler), other.result(HANG_S)]


def exit_barrier(info: RendezvousInfo) -> None:
    """What torch's agent does, and nothing else, when its workers have succeeded."""
    store_util.barrier(
        info.store, info.world_size, "torchelastic/agent/terminal_state", barrier_timeout=300
    )


def until_finished(run: Run) -> None:
    """Wait until one node has recorded its success."""
    with run.ledger() as opened:
        until(lambda: opened.range(KEYS.ends).entries)


def failed_workers() -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=7, error_file="<N/A>")
    return ChildFailedError("train.py", {3: failure})


def shut_down_with(handler: HoldfastHandler, error: Exception) -> None:
    """As torch's launcher does it: in the `finally` of what it is about to raise."""
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            handler.shutdown()


# ---- cycles ------------------------------------------------------------------------------


def test_nodes_agree_on_ranks_and_share_a_store(run: Run) -> None:
    """Every node has a rank of its own; one store, hosted by rank 0's agent, serves them all."""
    handlers, infos = run.two()
    assert ranks(infos) == BOTH
    infos[0].store.set("greeting", "hello")
    assert infos[1].store.get("greeting") == b"hello"
    assert port(infos[0]) == port(infos[1])
    assert handlers[0].get_backend() == "holdfast"
    assert handlers[0].get_run_id() == "r"
    assert handlers[0].use_agent_store
    assert not handlers[0].is_closed()
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert os.environ["HOLDFAST_CYCLE"] == "1"


def test_failed_workers_end_the_cycle_for_all_and_the_next_store_is_empty(run: Run) -> None:
    """A node that comes back while its cycle runs ends it; nothing of the old store is left.

    The next cycle's store is another; the old one's port is closed before.
    """
    (zero, one), infos = run.two()
    old = port(infos[0])
    infos[0].store.set("address/of/rank1", "a process that will be dead")
    second = again(zero, one)
    assert ranks(second) == BOTH
    assert not second[0].store.check(["address/of/rank1"])
    assert old != port(second[0]) == port(second[1])
    listening = {at for _, at in listeners()}
    assert port(second[0]) in listening
    assert old not in listening
    assert os.environ["HOLDFAST_CYCLE"] == "2"


def test_restart_on_a_change_of_membership(run: Run) -> None:
    """With 1:2 one node works alone until another comes; then both work together."""
    one = run.node((1, 2))
    assert ranks(meet(one)) == [(0, 1)]
    newcomer = run.spare(nnodes=(1, 2))
    assert ranks(rejoin(one, newcomer)) == BOTH


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_leaves_with_an_error_of_its_own_ends_the_cycle_and_not_the_run(
    run: Run, rank: int
) -> None:
    """A local error closes nothing for the others: a spare takes the place at once.

    Also that of rank 0: the host of the store is nobody special.
    """
    handlers, _ = run.two(lease="30")
    spare = run.spare(lease="30")
    began = time.monotonic()
    shut_down_with(handlers[rank], OSError("the disk of this node is gone"))
    second = rejoin(handlers[1 - rank], spare)
    assert ranks(second) == BOTH
    assert time.monotonic() - began < 20.0  # nobody waited for the lease
    second[0].store.set("it", "works")
    assert second[1].store.get("it") == b"works"
    assert run.cycle().number == 2
    assert re.search("withdrew: .*the disk of this node is gone", run.why())


# ---- ends --------------------------------------------------------------------------------


def test_success_needs_every_node_and_sends_spares_and_late_comers_home_in_peace(run: Run) -> None:
    """The exit barrier is what says that workers have succeeded, and it opens with the run."""
    handlers, infos = run.two()
    spare = run.spare()
    first = behind(exit_barrier, infos[0])
    until_finished(run)
    assert not first.done()
    assert run.cycle().state == "running"
    exit_barrier(infos[1])
    first.result(HANG_S)
    assert run.cycle().state == "succeeded"
    for late in (spare, run.spare()):
        with pytest.raises(RendezvousGracefulExitError):
            late.result(HANG_S)
    assert all(handler.shutdown() for handler in handlers)
    assert run.cycle().state == "succeeded"


def test_a_used_run_name_cannot_be_taken_for_a_run(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's agent would print nothing and exit with 0: stderr says what did not happen, and why.

    A run that ended before its end was recorded with a time is told without one.
    """
    (info,) = meet(run.node((1, 1)))
    exit_barrier(info)
    assert capfd.readouterr().err == ""
    late = run.node((1, 1))
    with pytest.raises(RendezvousGracefulExitError, match="NOTHING WAS STARTED"):
        late.next_rendezvous()
    said = capfd.readouterr().err
    assert re.search(
        r"holdfast: NOTHING WAS STARTED: the run 'r' succeeded \d+ s ago \(\d{4}-.* UTC\) after "
        r"1 cycle.*--rdzv-id NAME\n",
        said,
    )
    old = Cycle(number=2, state="succeeded", rules=Rules(minimum=1, maximum=1))
    assert "'r' succeeded after 2 cycles" in used_name("r", old, "--run")


def test_used_up_restarts_fail_the_run_for_all_with_the_reason(run: Run) -> None:
    """torch's agent counts restarts; when its own are used up, everybody learns why."""
    (zero, one), _ = run.two()
    spare = run.spare()
    shut_down_with(zero, failed_workers())
    with pytest.raises(RendezvousClosedError, match="rank 3 ended with 7"):
        spare.result(HANG_S)
    until_told(one)
    with pytest.raises(RendezvousClosedError, match="another --rdzv-id"):
        one.next_rendezvous()
    late = run.node()
    with pytest.raises(RendezvousClosedError, match=r"NOTHING WAS STARTED: .* rank 3 ended"):
        late.next_rendezvous()
    assert run.cycle().state == "failed"


def test_used_up_restarts_of_one_node_that_a_spare_replaces_do_not_fail_the_run(run: Run) -> None:
    """Its workers failed first, twice in a row: the spare takes its rank, and only it leaves."""
    conf = {"spares": "1", "last_call_timeout": "600"}
    bad, good, spare = (
        run.node((2, 3), node_name=f"n{i}", infra_rank=str(i), **conf) for i in range(3)
    )
    waiting = behind(spare.next_rendezvous)
    meet(bad, good)
    again(bad, good)
    shut_down_with(bad, failed_workers())
    assert ranks(rejoin(good, waiting)) == BOTH
    cycle = run.cycle()
    assert (cycle.state, cycle.number) == ("running", 3)
    assert [member.name for member in cycle.members] == ["n2", "n1"]


def test_an_agent_that_had_finished_fails_when_the_run_goes_on_without_it(run: Run) -> None:
    """torch's agent cannot run its workers again; what it must not do is to exit with 0."""
    (zero, one), infos = run.two()
    barrier = behind(exit_barrier, infos[0])
    until_finished(run)
    back = behind(one.next_rendezvous)  # the other one's workers failed after all
    with pytest.raises(RendezvousClosedError):
        barrier.result(HANG_S)
    with pytest.raises(RendezvousClosedError, match="start this node again"):
        zero.shutdown()
    assert ranks([*meet(run.node()), back.result(HANG_S)]) == BOTH


def test_closing_by_hand_ends_the_run_and_is_not_success(run: Run) -> None:
    """`set_closed` reaches nodes that work, that wait and that come late, as a failure."""
    (zero, one), _ = run.two()
    spare = run.spare()
    zero.set_closed()
    assert one.is_closed()
    with pytest.raises(RendezvousClosedError, match="set_closed"):
        spare.result(HANG_S)
    until_told(one)
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()


# ---- shutdown, and what listens ------------------------------------------------------------


def test_the_state_after_a_shutdown(run: Run) -> None:
    """A handler that was shut down is closed, asks for nothing, and may be shut down again."""
    handler = run.node((1, 1))
    meet(handler)
    assert handler.shutdown()
    assert handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert run.node((1, 1), run="another").shutdown()


def test_the_store_listens_on_the_nodes_own_address_and_on_no_other(run: Run) -> None:
    """It has no password: `--local-addr 127.0.0.1`, or an sqlite ledger, keeps others out."""
    before = listeners()
    node = run.node((1, 1))
    (info,) = meet(node)
    assert ("127.0.0.1", port(info)) in listeners() - before
    assert len(listeners() - before) == 2, "the store, and what answers probes"
    spare = run.spare(nnodes=(1, 1))
    until(lambda: len(listeners() - before) == 4 or spare.done())
    assert {address for address, _ in listeners() - before} == {"127.0.0.1"}
    node.set_closed()
    with pytest.raises(RendezvousClosedError):
        spare.result(HANG_S)


def test_nothing_listens_after_a_shutdown(run: Run) -> None:
    """torch's agent still holds the store that it was given; its server is gone all the same."""
    before = listeners()
    handlers, infos = run.two()
    gc.disable()
    try:
        for handler in handlers:
            shut_down_with(handler, OSError("told to end"))
        assert not listeners() - before
    finally:
        gc.enable()
    assert infos


@pytest.mark.long
def test_children_that_are_forked_after_a_shutdown_live(tmp_path: Path) -> None:
    """A server aborts the forked child that destroys it: there is no server any more."""
    code = textwrap.dedent(f"""
        import gc, os, threading
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
        gc.disable()
        url = "sqlite:///{tmp_path}/ledger.db"
        params = RendezvousParameters("holdfast", url, "r", 1, 1, local_addr="127.0.0.1")
        handler = get_rendezvous_handler(params)
        info = handler.next_rendezvous()
        handler.shutdown()
        if os.fork() == 0:
            for _ in range(20):  # on the stacks of threads that were not forked
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            del handler, info, params
            gc.collect()
            os._exit(0)
        raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 0


def test_a_spare_has_a_new_port_in_every_cycle(run: Run) -> None:
    """Whoever still believes that it was rank 0 in an old cycle knocks at a closed door."""
    (zero, one), _ = run.two()
    spare = run.node()
    behind(spare.next_rendezvous)
    with run.ledger() as opened:

        def ready_for(cycle: int) -> int:
            entry = opened.get(KEYS.node(spare.node_name))
            node = decode(Node, entry) if entry else None
            return node.port if node and node.cycle == cycle else 0

        until(lambda: ready_for(1))
        before = ready_for(1)
        again(zero, one)
        until(lambda: ready_for(2))
        assert ready_for(2) != before


# ---- losses ------------------------------------------------------------------------------


def test_a_lost_lease_sends_the_agent_back_and_it_joins_again(run: Run) -> None:
    """The ledger says that the node is gone: its agent stops its workers and enters anew."""
    handlers, _ = run.two(lease="30")
    with run.ledger() as opened:
        opened.revoke(opened.range(KEYS.nodes).entries[0].lease)
    for handler in handlers:
        until_told(handler)
    assert ranks(meet(*handlers)) == BOTH
    assert " lost: " in run.why()


def test_a_node_that_has_lost_its_lease_ends_nothing_for_the_others(run: Run) -> None:
    """An agent wakes from a long pause with no restarts left: the run has gone on without it."""
    (asleep, awake), _ = run.two(lease="30")
    spare = run.spare(lease="30")
    with run.ledger() as opened:
        until(lambda: len(opened.range(KEYS.nodes).entries) == 3)
        entry = opened.get(KEYS.node(asleep.node_name))
        assert entry is not None
        opened.revoke(entry.lease)
    assert ranks(rejoin(awake, spare)) == BOTH
    shut_down_with(asleep, failed_workers())
    assert run.cycle().state == "running"
    assert awake.num_nodes_waiting() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_dies_while_ranks_are_given_does_not_hold_up_the_agent(
    run: Run, rank: int
) -> None:
    """torch's exchange of ranks ends with the cycle instead of after 5 minutes.

    Also when the store's own host dies: the answer is a rank that belongs to nobody else.
    """
    handlers, infos = run.two()
    store, other = infos[rank].store, handlers[1 - rank]
    role = json.dumps({"role": "default", "rank": rank, "local_world_size": 2})
    store.set(f"torchelastic/role_info/{rank}", role)
    if rank == 0:
        keys = [f"torchelastic/role_info/{one}" for one in range(2)]
        waiting = behind(store.multi_get, keys)
    else:
        waiting = behind(store.get, "torchelastic/assigned_ranks/1")
    shut_down_with(other, OSError("died before it had said how many workers it has"))
    answer = waiting.result(HANG_S)
    assert b'"rank": 1' in answer[1] if rank == 0 else answer == b"[2, 4, 2, 4]"
    until_told(handlers[rank])


def test_a_join_that_takes_too_long_is_an_error_of_its_node_and_closes_nothing(run: Run) -> None:
    """It says who is missing; the nodes that come later meet under the same name."""
    alone = run.node(join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes are ready"):
        alone.next_rendezvous()
    shut_down_with(alone, RendezvousTimeoutError("as torch's launcher passes it on"))
    assert run.cycle().state == "open"
    assert ranks(meet(run.node(), run.node(join_timeout=0.5))) == BOTH


def test_a_second_node_of_one_name_hears_so_at_once(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for leases, and the first is not disturbed."""
    first, other = run.node(node_name="one", lease=600), run.node(node_name="two", lease=600)
    meet(first, other)
    with pytest.raises(Mistake, match="a node named 'one' is already in this run"):
        run.spare(node_name="one", lease=600).result(HANG_S)
    assert "holdfast: a node named 'one' is already in this run" in capfd.readouterr().err
    assert not first.num_nodes_waiting()
    assert (run.cycle().number, run.cycle().state) == (1, "running")


def test_a_rank_0_that_is_not_reached_loses_its_rank(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others report it and meet without it; it waits behind all others, and hears why."""
    hidden, *others = (
        run.node((2, 3), node_name=f"n{i}", infra_rank=i, spares=1, last_call_timeout=600)
        for i in range(3)
    )
    stranger = ProbeServer("127.0.0.1", "r", "another program")  # as at 127.0.0.1 of a machine
    hidden._member._probes = stranger
    hidden._run(stranger.start())
    infos = meet(hidden, *others)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2), (0, 2)]
    assert [member.name for member in run.cycle().members] == ["n2", "n1"]
    assert run.why() == "n0 unreachable: 1 of 1 other nodes do not reach it at 127.0.0.1: n1"
    said = capfd.readouterr().err
    assert "n0 is not reached at 127.0.0.1" in said
    assert "another program answers there" in said
    until_told(hidden)
    back = behind(hidden.next_rendezvous)  # as torch's agent does it, and there it waits
    until(lambda: "this node comes after all spares" in capfd.readouterr().err)
    assert not back.done()
    hidden.set_closed()
    with pytest.raises(RendezvousClosedError):
        back.result(HANG_S)


# ---- etcd --------------------------------------------------------------------------------


def test_a_ledger_that_is_not_there_is_a_connection_error(run: Run) -> None:
    """One clear line, and no waiting: nobody may have started it, or the URL is wrong."""
    handler = run.node((1, 1), url="etcd://127.0.0.1:1")
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        handler.next_rendezvous()
    assert handler.shutdown() in (True, False)


@pytest.mark.etcd
def test_on_etcd(run: Run, etcd_url: str) -> None:
    """The same on a real etcd: two nodes, a restart, success."""
    conf = {"url": etcd_url, "run": f"torchrun-{os.getpid()}", "lease": "5"}
    (zero, one), _ = run.two(**conf)
    infos = again(zero, one)
    assert ranks(infos) == BOTH
    first = behind(exit_barrier, infos[0])
    exit_barrier(infos[1])
    first.result(HANG_S)
    with pytest.raises(RendezvousGracefulExitError):
        run.spare(**conf).result(HANG_S)


@pytest.mark.etcd
def test_a_ledger_that_is_cut_off_stops_the_workers_and_is_found_again(
    run: Run, tmp_path: Path
) -> None:
    """Without a ledger a node cannot know that it still holds its rank: its workers must stop."""
    with EtcdServer(tmp_path / "etcd") as server:
        url = f"etcd://{server.host}:{server.port}?timeout=1"
        handler = run.node((1, 1), url=url, lease="3")
        meet(handler)
        server.pause()
        until_told(handler)
        back = behind(handler.next_rendezvous)
        server.resume()
        assert ranks([back.result(HANG_S)]) == [(0, 1)]
        exit_barrier(back.result())
        assert handler.shutdown()
