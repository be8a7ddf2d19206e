"""The handler, called as torch's agent calls it: several nodes as threads, real ledgers.

These are the ideas of torch's own tests of handlers: ranks, restart on a change of membership, a
node that leaves, closing, the state after a shutdown; and what ours adds to them.
"""

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as store_util

from holdfast import ledger
from holdfast.contrib.torchrun.handler import HoldfastHandler
from holdfast.errors import Mistake
from holdfast.ledger.records import decode
from holdfast.rendezvous.overview import used_name
from holdfast.rendezvous.probe import ProbeServer
from holdfast.rendezvous.records import Cycle, Keys, Node, Rules
from holdfast.servers import EtcdServer
from listening import listeners
from patience import HANG_S
from rendezvous.torchrun.conftest import Make

LIMIT_S = HANG_S


def behind(call: Any, *args: Any) -> "Future[Any]":
    """Make a call in a thread that nobody has to wait for."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def meet(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """All call `next_rendezvous` at once; the answers in their order."""
    answers = [behind(handler.next_rendezvous) for handler in handlers]
    return [answer.result(LIMIT_S) for answer in answers]


def ranks(infos: list[RendezvousInfo]) -> list[tuple[int, int]]:
    return sorted((info.rank, info.world_size) for info in infos)


def wait_for(test: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not test():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)


def until_told(handler: RendezvousHandler) -> None:
    """Wait until the agent would restart its workers."""
    wait_for(handler.num_nodes_waiting)


def owns(handler: RendezvousHandler, name: str) -> bool:
    """Whether a node is this handler's."""
    assert isinstance(handler, HoldfastHandler)
    return handler.node_name == name


def by_rank(handlers: list[RendezvousHandler], infos: list[RendezvousInfo]) -> Any:
    order = sorted(range(len(infos)), key=lambda i: infos[i].rank)
    return [handlers[i] for i in order], [infos[i] for i in order]


def exit_barrier(info: RendezvousInfo) -> None:
    """What torch's agent does, and nothing else, when its workers have succeeded."""
    store_util.barrier(
        info.store, info.world_size, "torchelastic/agent/terminal_state", barrier_timeout=300
    )


def failed_workers() -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=7, error_file="<N/A>")
    return ChildFailedError("train.py", {3: failure})


def shut_down_with(handler: RendezvousHandler, error: Exception) -> None:
    """As torch's launcher does it: in the `finally` of what it is about to raise."""
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            handler.shutdown()


def record(tmp_path: Any) -> Cycle:
    with ledger.open_sync(f"sqlite:///{tmp_path}/ledger.db") as opened:
        entry = opened.get(Keys("r").cycle)
    assert entry is not None
    return decode(Cycle, entry)


def until_finished(tmp_path: Any) -> None:
    """Wait until one node has recorded its success."""
    with ledger.open_sync(f"sqlite:///{tmp_path}/ledger.db") as opened:
        wait_for(lambda: opened.range(Keys("r").ends).entries)


def test_nodes_agree_on_ranks_and_share_a_store(make: Make) -> None:
    """Every node has a rank of its own; one store, hosted by rank 0's agent, serves them all."""
    handlers = [make() for _ in range(2)]
    infos = meet(*handlers)
    assert ranks(infos) == [(0, 2), (1, 2)]
    infos[0].store.set("greeting", "hello")
    assert infos[1].store.get("greeting") == b"hello"
    places = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
        if info.bootstrap_store_info
    }
    assert len(places) == 1
    assert handlers[0].get_backend() == "holdfast"
    assert handlers[0].get_run_id() == "r"
    assert handlers[0].use_agent_store
    assert not handlers[0].is_closed()
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert os.environ["HOLDFAST_CYCLE"] == "1"


def test_failed_workers_end_the_cycle_for_all_and_the_next_store_is_empty(make: Make) -> None:
    """A node that comes back while its cycle runs ends it; nothing of the old store is left."""
    handlers = [make() for _ in range(2)]
    first = meet(*handlers)
    first[0].store.set("address/of/rank1", "a process that will be dead")
    again = behind(handlers[0].next_rendezvous)
    until_told(handlers[1])
    second = [*meet(handlers[1]), again.result(LIMIT_S)]
    assert ranks(second) == [(0, 2), (1, 2)]
    assert not second[0].store.check(["address/of/rank1"])
    ports = [
        i.bootstrap_store_info.master_port for i in (*first, *second) if i.bootstrap_store_info
    ]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert os.environ["HOLDFAST_CYCLE"] == "2"


def test_restart_on_a_change_of_membership(make: Make) -> None:
    """With 1:2 one node works alone until another comes; then both work together."""
    one, two = make((1, 2)), make((1, 2))
    assert ranks(meet(one)) == [(0, 1)]
    newcomer = behind(two.next_rendezvous)
    until_told(one)
    assert ranks([*meet(one), newcomer.result(LIMIT_S)]) == [(0, 2), (1, 2)]


def test_a_node_that_leaves_with_an_error_of_its_own_ends_the_cycle_and_not_the_run(
    make: Make, tmp_path: Any
) -> None:
    """A local error closes nothing for the others: a spare takes the place at once."""
    handlers = [make(lease="30") for _ in range(2)]
    infos = meet(*handlers)
    spare = behind(make(lease="30").next_rendezvous)
    (stays, leaves), _ = by_rank(handlers, infos)
    began = time.monotonic()
    shut_down_with(leaves, OSError("the disk of this node is gone"))
    until_told(stays)
    assert ranks([*meet(stays), spare.result(LIMIT_S)]) == [(0, 2), (1, 2)]
    assert time.monotonic() - began < 20.0  # nobody waited for the lease
    cause = record(tmp_path).cause
    assert cause is not None
    assert cause.kind == "withdrew"
    assert "the disk of this node is gone" in cause.detail


def test_rank_0_leaves_and_it_costs_one_cycle(make: Make, tmp_path: Any) -> None:
    """The host of the store is nobody special."""
    handlers = [make() for _ in range(2)]
    infos = meet(*handlers)
    spare = behind(make().next_rendezvous)
    (leaves, stays), _ = by_rank(handlers, infos)
    shut_down_with(leaves, OSError("gone"))
    until_told(stays)
    second = [*meet(stays), spare.result(LIMIT_S)]
    assert ranks(second) == [(0, 2), (1, 2)]
    second[0].store.set("it", "works")
    assert second[1].store.get("it") == b"works"
    assert record(tmp_path).number == 2


def test_success_needs_every_node_and_sends_spares_and_late_comers_home_in_peace(
    make: Make, tmp_path: Any
) -> None:
    """The exit barrier is what says that workers have succeeded, and it opens with the run."""
    handlers = [make() for _ in range(2)]
    infos = meet(*handlers)
    spare = behind(make().next_rendezvous)
    first = behind(exit_barrier, infos[0])
    until_finished(tmp_path)
    assert not first.done()
    assert record(tmp_path).state == "running"
    exit_barrier(infos[1])
    first.result(LIMIT_S)
    assert record(tmp_path).state == "succeeded"
    with pytest.raises(RendezvousGracefulExitError):
        spare.result(LIMIT_S)
    with pytest.raises(RendezvousGracefulExitError):
        make().next_rendezvous()
    assert all(handler.shutdown() for handler in handlers)
    assert record(tmp_path).state == "succeeded"


def test_a_used_run_name_cannot_be_taken_for_a_run(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's agent would print nothing and exit with 0: stderr says what did not happen, and why.

    A run that ended before its end was recorded with a time is told without one.
    """
    (info,) = meet(make((1, 1)))
    exit_barrier(info)
    assert capfd.readouterr().err == ""
    late = make((1, 1))
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


def test_used_up_restarts_fail_the_run_for_all_with_the_reason(make: Make, tmp_path: Any) -> None:
    """torch's agent counts restarts; when its own are used up, everybody learns why."""
    handlers = [make() for _ in range(2)]
    meet(*handlers)
    spare = behind(make().next_rendezvous)
    shut_down_with(handlers[0], failed_workers())
    with pytest.raises(RendezvousClosedError, match="rank 3 ended with 7"):
        spare.result(LIMIT_S)
    until_told(handlers[1])
    with pytest.raises(RendezvousClosedError, match="another --rdzv-id"):
        handlers[1].next_rendezvous()
    with pytest.raises(
        RendezvousClosedError, match=r"NOTHING WAS STARTED: .* rank 3 ended with 7"
    ):
        make().next_rendezvous()
    assert record(tmp_path).state == "failed"


def test_used_up_restarts_of_one_node_that_a_spare_replaces_do_not_fail_the_run(
    make: Make, tmp_path: Any
) -> None:
    """Its workers failed first, twice in a row: the spare takes its rank, and only it leaves."""
    conf = {"spares": "1", "last_call_timeout": "600"}
    bad, good, spare = (
        make((2, 3), node_name=f"n{i}", infra_rank=str(i), **conf) for i in range(3)
    )
    waiting = behind(spare.next_rendezvous)
    meet(bad, good)
    again = behind(bad.next_rendezvous)  # its workers have failed for the first time
    until_told(good)
    meet(good)
    again.result(LIMIT_S)
    shut_down_with(bad, failed_workers())
    until_told(good)
    (info,) = meet(good)
    assert {info.rank, waiting.result(LIMIT_S).rank} == {0, 1}
    cycle = record(tmp_path)
    assert (cycle.state, cycle.number) == ("running", 3)
    assert [member.name for member in cycle.members] == ["n2", "n1"]


def test_an_agent_that_had_finished_fails_when_the_run_goes_on_without_it(
    make: Make, tmp_path: Any
) -> None:
    """torch's agent cannot run its workers again; what it must not do is to exit with 0."""
    handlers = [make() for _ in range(2)]
    infos = meet(*handlers)
    barrier = behind(exit_barrier, infos[0])
    until_finished(tmp_path)
    again = behind(handlers[1].next_rendezvous)  # the other one's workers failed after all
    with pytest.raises(RendezvousClosedError):
        barrier.result(LIMIT_S)
    with pytest.raises(RendezvousClosedError, match="start this node again"):
        handlers[0].shutdown()
    assert ranks([*meet(make()), again.result(LIMIT_S)]) == [(0, 2), (1, 2)]


def test_closing_by_hand_ends_the_run_and_is_not_success(make: Make) -> None:
    """`set_closed` reaches nodes that work, that wait and that come late, as a failure."""
    handlers = [make() for _ in range(2)]
    meet(*handlers)
    spare = behind(make().next_rendezvous)
    handlers[0].set_closed()  # type: ignore[no-untyped-call]
    assert handlers[1].is_closed()
    with pytest.raises(RendezvousClosedError, match="set_closed"):
        spare.result(LIMIT_S)
    until_told(handlers[1])
    with pytest.raises(RendezvousClosedError):
        handlers[1].next_rendezvous()


def test_the_state_after_a_shutdown(make: Make) -> None:
    """A handler that was shut down is closed, asks for nothing, and may be shut down again."""
    handler = make((1, 1))
    meet(handler)
    assert handler.shutdown()
    assert handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    unused = make((1, 1), run="another")
    assert unused.shutdown()


def test_the_store_listens_on_the_nodes_own_address_and_on_no_other(make: Make) -> None:
    """It has no password: `--local-addr 127.0.0.1`, or an sqlite ledger, keeps others out."""
    before = listeners()
    node = make((1, 1))
    (info,) = meet(node)
    assert info.bootstrap_store_info is not None
    port = info.bootstrap_store_info.master_port
    assert ("127.0.0.1", port) in listeners() - before
    assert len(listeners() - before) == 2, "the store, and what answers probes"
    spare = behind(make((1, 1)).next_rendezvous)
    wait_for(lambda: len(listeners() - before) == 4 or spare.done())
    assert {address for address, _ in listeners() - before} == {"127.0.0.1"}
    node.set_closed()  # type: ignore[no-untyped-call]
    with pytest.raises(RendezvousClosedError):
        spare.result(LIMIT_S)


def test_nothing_listens_after_a_shutdown(make: Make) -> None:
    """torch's agent still holds the store that it was given; its server is gone all the same."""
    before = listeners()
    handlers = [make(), make()]
    infos = meet(*handlers)
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


def test_a_cycle_that_is_over_has_no_store(make: Make) -> None:
    """The next cycle's store is another; the old one's port is closed before."""
    before = listeners()
    handler = make((1, 1))
    first = meet(handler)
    second = meet(handler)
    ports = [i.bootstrap_store_info.master_port for i in first + second if i.bootstrap_store_info]
    there = {port for _, port in listeners() - before}
    assert ports[1] in there
    assert ports[0] not in there


def test_a_lost_lease_sends_the_agent_back_and_it_joins_again(make: Make, tmp_path: Any) -> None:
    """The ledger says that the node is gone: its agent stops its workers and enters anew."""
    handlers = [make(lease="30") for _ in range(2)]
    meet(*handlers)
    with ledger.open_sync(f"sqlite:///{tmp_path}/ledger.db") as opened:
        node = opened.range(Keys("r").nodes).entries[0]
        opened.revoke(node.lease)
    for handler in handlers:
        until_told(handler)
    assert ranks(meet(*handlers)) == [(0, 2), (1, 2)]
    cause = record(tmp_path).cause
    assert cause is not None
    assert cause.kind == "lost"


def test_a_node_that_has_lost_its_lease_ends_nothing_for_the_others(
    make: Make, tmp_path: Any
) -> None:
    """An agent wakes from a long pause with no restarts left: the run has gone on without it."""
    handlers = [make(lease="30") for _ in range(2)]
    meet(*handlers)
    spare = behind(make(lease="30").next_rendezvous)
    with ledger.open_sync(f"sqlite:///{tmp_path}/ledger.db") as opened:
        wait_for(lambda: len(opened.range(Keys("r").nodes).entries) == 3)
        zero = record(tmp_path).members[0].name
        entry = opened.get(Keys("r").node(zero))
        assert entry is not None
        opened.revoke(entry.lease)
    asleep, awake = handlers if owns(handlers[0], zero) else handlers[::-1]
    until_told(awake)
    assert ranks([*meet(awake), spare.result(LIMIT_S)]) == [(0, 2), (1, 2)]
    shut_down_with(asleep, failed_workers())
    assert record(tmp_path).state == "running"
    assert awake.num_nodes_waiting() == 0


def test_a_peer_that_dies_while_ranks_are_given_does_not_hold_up_the_agent(make: Make) -> None:
    """torch's exchange of ranks ends with the cycle instead of after 5 minutes."""
    handlers = [make() for _ in range(2)]
    (zero, one), infos = by_rank(handlers, meet(*handlers))
    role = b'{"role": "default", "rank": 0, "local_world_size": 2}'
    infos[0].store.set("torchelastic/role_info/0", role)
    keys = [f"torchelastic/role_info/{rank}" for rank in range(2)]
    waiting = behind(infos[0].store.multi_get, keys)
    shut_down_with(one, OSError("died before it had said how many workers it has"))
    answers = waiting.result(LIMIT_S)
    assert b'"rank": 1' in answers[1]
    assert zero.num_nodes_waiting() == 1


def test_rank_0_that_dies_while_ranks_are_given_does_not_hold_up_the_others(make: Make) -> None:
    """Nor does the store's own host: the answer is a rank that belongs to nobody else."""
    handlers = [make() for _ in range(2)]
    (zero, one), infos = by_rank(handlers, meet(*handlers))
    infos[1].store.set(
        "torchelastic/role_info/1", b'{"role": "d", "rank": 1, "local_world_size": 2}'
    )
    waiting = behind(infos[1].store.get, "torchelastic/assigned_ranks/1")
    shut_down_with(zero, OSError("gone"))
    assert waiting.result(LIMIT_S) == b"[2, 4, 2, 4]"
    until_told(one)


def test_a_spare_has_a_new_port_in_every_cycle(make: Make, tmp_path: Any) -> None:
    """Whoever still believes that it was rank 0 in an old cycle knocks at a closed door."""
    handlers, spare = [make() for _ in range(2)], make()
    assert isinstance(spare, HoldfastHandler)
    key = Keys("r").node(spare.node_name)
    meet(*handlers)
    behind(spare.next_rendezvous)
    with ledger.open_sync(f"sqlite:///{tmp_path}/ledger.db") as opened:

        def ready_for(cycle: int) -> int:
            entry = opened.get(key)
            node = decode(Node, entry) if entry else None
            return node.port if node and node.cycle == cycle else 0

        wait_for(lambda: ready_for(1))
        before = ready_for(1)
        again = behind(handlers[0].next_rendezvous)
        until_told(handlers[1])
        meet(handlers[1])
        again.result(LIMIT_S)
        wait_for(lambda: ready_for(2))
        assert ready_for(2) != before


def test_a_join_that_takes_too_long_is_an_error_of_its_node_and_closes_nothing(
    make: Make, tmp_path: Any
) -> None:
    """It says who is missing; the nodes that come later meet under the same name."""
    alone = make(join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes are ready"):
        alone.next_rendezvous()
    shut_down_with(alone, RendezvousTimeoutError("as torch's launcher passes it on"))
    assert record(tmp_path).state == "open"
    assert ranks(meet(make(), make(join_timeout=0.5))) == [(0, 2), (1, 2)]


def test_a_second_node_of_one_name_hears_so_at_once(
    make: Make, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for leases, and the first is not disturbed."""
    first, other = make(node_name="one", lease=600), make(node_name="two", lease=600)
    meet(first, other)
    with pytest.raises(Mistake, match="a node named 'one' is already in this run"):
        behind(make(node_name="one", lease=600).next_rendezvous).result(LIMIT_S)
    assert "holdfast: a node named 'one' is already in this run" in capfd.readouterr().err
    assert not first.num_nodes_waiting()
    assert (record(tmp_path).number, record(tmp_path).state) == (1, "running")


def test_a_rank_0_that_is_not_reached_loses_its_rank(
    make: Make, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others report it and meet without it; it waits behind all others, and hears why."""
    hidden = make((2, 3), node_name="hidden", infra_rank=0, spares=1, last_call_timeout=600)
    assert isinstance(hidden, HoldfastHandler)
    stranger = ProbeServer("127.0.0.1", "r", "another program")  # as at 127.0.0.1 of a machine
    hidden._member._probes = stranger
    hidden._run(stranger.start())
    others = [
        make((2, 3), node_name=f"n{i}", infra_rank=i, spares=1, last_call_timeout=600)
        for i in (1, 2)
    ]
    infos = meet(hidden, *others)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2), (0, 2)]
    cycle = record(tmp_path)
    assert [member.name for member in cycle.members] == ["n2", "n1"]
    assert str(cycle.cause) == (
        "hidden unreachable: 1 of 1 other nodes do not reach it at 127.0.0.1: n1"
    )
    said = capfd.readouterr().err
    assert "hidden is not reached at 127.0.0.1" in said
    assert "another program answers there" in said
    until_told(hidden)
    back = behind(hidden.next_rendezvous)  # as torch's agent does it, and there it waits
    wait_for(lambda: "this node comes after all spares" in capfd.readouterr().err)
    assert not back.done()
    hidden.set_closed()
    with pytest.raises(RendezvousClosedError):
        back.result(LIMIT_S)


def test_a_ledger_that_is_not_there_is_a_connection_error(make: Make) -> None:
    """One clear line, and no waiting: nobody may have started it, or the URL is wrong."""
    handler = make((1, 1), url="etcd://127.0.0.1:1")
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        handler.next_rendezvous()
    assert handler.shutdown() in (True, False)


@pytest.mark.etcd
def test_on_etcd(make: Make, etcd_url: str) -> None:
    """The same on a real etcd: two nodes, a restart, success."""
    run = f"torchrun-{os.getpid()}"
    handlers = [make(url=etcd_url, run=run, lease="5") for _ in range(2)]
    meet(*handlers)
    again = behind(handlers[0].next_rendezvous)
    until_told(handlers[1])
    infos = [*meet(handlers[1]), again.result(LIMIT_S)]
    assert ranks(infos) == [(0, 2), (1, 2)]
    first = behind(exit_barrier, infos[0])
    exit_barrier(infos[1])
    first.result(LIMIT_S)
    with pytest.raises(RendezvousGracefulExitError):
        make(url=etcd_url, run=run, lease="5").next_rendezvous()


@pytest.mark.etcd
def test_a_ledger_that_is_cut_off_stops_the_workers_and_is_found_again(
    make: Make, tmp_path: Any
) -> None:
    """Without a ledger a node cannot know that it still holds its rank: its workers must stop."""
    with EtcdServer(tmp_path / "etcd") as server:
        handler = make((1, 1), url=f"etcd://{server.host}:{server.port}?timeout=1", lease="3")
        meet(handler)
        server.pause()
        until_told(handler)
        again = behind(handler.next_rendezvous)
        server.resume()
        assert ranks([again.result(LIMIT_S)]) == [(0, 1)]
        exit_barrier(again.result())
        assert handler.shutdown()
