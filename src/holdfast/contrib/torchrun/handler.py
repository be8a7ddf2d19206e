"""The handler that torch's agent talks to.

A thread of its own keeps this node in the rendezvous (member.py); the calls of torch's interface
hand their work to it and wait. What they mean here:

    next_rendezvous     a place in the next cycle and its store (store.py); spares wait in it
    num_nodes_waiting   1 when the cycle is over or the lease lost: torch's agent then stops its
                        workers and comes back for the next cycle; never blocks, never raises
    shutdown            the agent ends: with success, with failed workers, or with an error of its
                        own, and these three are told apart (see `_say_farewell`)
    is_closed           the run has succeeded or failed
    set_closed          the run fails, for everybody

Exit codes of torchrun are a promise: 0 if and only if the run has succeeded. torch 2.13 breaks it
twice, and `shutdown`, the last that it calls, mends both: for a spare that leaves in peace its
launcher trips over its own feet (`AttributeError` on a result that is None); and an agent whose
workers have succeeded returns 0 even if the run goes on without it.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

# torch exports the store without saying so.
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from holdfast import ledger
from holdfast.contrib.torchrun import BACKEND
from holdfast.contrib.torchrun.member import Ended, Membership, TooLate, fail
from holdfast.contrib.torchrun.options import Options
from holdfast.contrib.torchrun.store import AgentStore, Over, host, reach
from holdfast.errors import Gone, HoldfastError, Mistake, Retriable, UnknownOutcome
from holdfast.ledger.base import Ledger
from holdfast.ledger.records import load
from holdfast.ledger.runtime import LiveRuntime
from holdfast.loopthread import LoopThread
from holdfast.rendezvous.overview import say, used_name
from holdfast.rendezvous.records import Cause, Cycle, Keys
from holdfast.rendezvous.rendezvous import Place
from holdfast.timeouts import DEFAULTS

__all__ = ["HoldfastHandler"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class HoldfastHandler(RendezvousHandler):
    """One torchrun's way to the rendezvous."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._keys = Keys(options.run)
        self._thread: LoopThread | None = None
        self._ledger: Ledger = ledger.open(options.url)
        self._runtime = LiveRuntime(self._ledger)
        self._member = Membership(self._runtime, options)
        self._server: TCPStore | None = None
        self._finished = False
        self._succeeded = False
        self._dismissed = False
        self._closed = False
        atexit.register(self._at_exit)

    # ---- torch's interface -----------------------------------------------------

    def get_backend(self) -> str:
        """See `RendezvousHandler`."""
        return BACKEND

    def get_run_id(self) -> str:
        """See `RendezvousHandler`."""
        return self._options.run

    @property
    def node_name(self) -> str:
        """This node's name in the run, as `holdfast status` shows it."""
        return self._options.name

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of the cycle, too: rank 0's agent hosts it, and it is new."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in the next cycle."""
        if self._closed:
            raise RendezvousClosedError(f"this handler of {self._options.run!r} was shut down")
        while True:
            self._server = None
            place = self._join()
            try:
                store = self._open_store(place)
            except Over:
                continue
            break
        self._tell_workers(place)
        _log.info("cycle %s: rank %s of %s nodes", place.cycle, place.rank, place.nodes)
        return RendezvousInfo(
            store, place.rank, place.nodes, RendezvousStoreInfo(place.address, place.port)
        )

    def num_nodes_waiting(self) -> int:
        """1 when this agent is to stop its workers and come back; else 0."""
        return int(not self._closed and self._member.place is not None and self._member.stale())

    def is_closed(self) -> bool:
        """Whether the run is over, or this handler was shut down."""
        if self._closed:
            return True
        with _torch_errors():
            stored = self._run(load(self._ledger, self._keys.cycle, Cycle))
        return stored is not None and stored.record.final

    def set_closed(self) -> None:
        """End the run for everybody. That is not success: every node exits with 1."""
        cause = Cause(kind="asked", node=self._options.name, detail="set_closed was called")
        with _torch_errors():
            self._run(fail(self._runtime, self._keys, cause))

    def shutdown(self) -> bool:
        """Leave. True unless the others could not be told."""
        error = sys.exception()  # what torch's launcher is about to raise
        if self._closed:
            return True
        told = self._leave(error)
        if self._dismissed and isinstance(error, AttributeError):
            raise SystemExit(0) from None
        if self._finished and error is None and not self._succeeded:
            raise RendezvousClosedError(
                f"the workers of this node had succeeded, but the run {self._options.run!r} has "
                "not, and torch's agent cannot run them again: start this node again"
            )
        return told

    # ---- joining ---------------------------------------------------------------

    def _join(self) -> Place:
        try:
            with _torch_errors():
                return self._run(self._member.join())
        except Mistake as error:
            say(str(error))  # torch's agent shows a traceback; the cause is its last line
            raise
        except Ended as end:
            cycle = end.cycle
        run = self._options.run
        late = not self._member.took_part
        if cycle.state == "succeeded":
            self._dismissed = True
            told = f"the run {run!r} has succeeded without this node"
            if late:
                told = used_name(run, cycle, "--rdzv-id")
            say(told)  # torch's agent says nothing, and its torchrun exits with 0
            raise RendezvousGracefulExitError(told)
        raise RendezvousClosedError(
            used_name(run, cycle, "--rdzv-id")
            if late
            else f"the run {run!r} has failed ({cycle.cause}): for another try give another "
            "--rdzv-id"
        )

    def _open_store(self, place: Place) -> AgentStore:
        if place.rank == 0:
            self._server = host(place.address, self._member.take_listener())
        why = self._run(self._member.probe())
        try:
            if not why:
                store = reach(place.address, place.port, self._member.stale)
        except DistError as error:
            why = f"{place.first}'s store is not reached at {place.address}:{place.port}: {error}"
        if why:
            self._report_unreached(why)
        return AgentStore(store, place.rank, place.nodes, self)

    def _report_unreached(self, why: str) -> NoReturn:
        """Let the others hear that rank 0 is not reached; raises `Over` when the cycle ends."""
        if not self._member.stale():
            say(why)
            with _torch_errors():
                ended = self._run(self._member.unreached())
            if not ended:
                raise RendezvousConnectionError(
                    f"{why}: give rank 0 a --local-addr that the other nodes can reach"
                )
        raise Over

    def _tell_workers(self, place: Place) -> None:
        """Give workers what `holdfast.cycle` needs; torch's agent hands its environment on."""
        os.environ |= {
            "HOLDFAST_RUN": self._options.run,
            "HOLDFAST_CYCLE": str(place.cycle),
            "HOLDFAST_CYCLE_REVISION": str(place.revision),
            "HOLDFAST_LEDGER": self._options.url,
            "HOLDFAST_NODE": self._options.name,
        }

    # ---- what the store asks (store.Course) ------------------------------------

    def stale(self) -> bool:
        """Whether the cycle is over."""
        return self._member.stale()

    def finish(self) -> None:
        """All workers of this node have succeeded."""
        self._finished = True
        try:
            self._run(self._member.finish())
        except HoldfastError as error:  # whether it counts all the same, `wait_for_end` will see
            _log.warning("this node's success may not have been recorded: %s", error)

    def wait_for_end(self) -> None:
        """Wait until the run has succeeded; raises when the cycle ends otherwise."""
        with _torch_errors():
            cycle = self._run(self._member.outcome())
        if cycle.state != "succeeded":
            raise RendezvousClosedError(f"cycle ended before all had succeeded: {cycle.cause}")
        self._succeeded = True

    # ---- leaving ---------------------------------------------------------------

    def _leave(self, error: BaseException | None) -> bool:
        """Tell the others, and let go of everything. False: they could not be told."""
        self._closed = True
        atexit.unregister(self._at_exit)
        thread = self._thread
        if thread is None:
            return True
        told = False
        try:
            thread.run(asyncio.wait_for(self._say_farewell(error), DEFAULTS.torchrun_farewell_s))
            told = True
            thread.run(asyncio.wait_for(self._ledger.close(), DEFAULTS.torchrun_farewell_s))
        except (HoldfastError, TimeoutError) as trouble:
            _log.warning(
                "%s could not be told that this node leaves: %s", self._options.run, trouble
            )
        finally:
            self._server = None  # nothing listens any more; a forked child inherits no server
        thread.stop()
        return told

    async def _say_farewell(self, error: BaseException | None) -> None:
        """Say what this agent's end means for the others.

        If its workers have succeeded, there is nothing to say. If they failed and its restarts are
        used up, the run fails. An error of its own: it leaves, and the run goes on.
        """
        try:
            if self._finished:
                return
            if error is None or isinstance(error, ChildFailedError):
                await self._member.fail(Cause(kind="failed", detail=_detail(error)))
            else:
                await self._member.give_up(Cause(kind="withdrew", detail=_detail(error)))
        finally:
            await self._member.close()

    def _at_exit(self) -> None:
        """A signal ends torch's agent without `shutdown`: let nobody wait for the lease."""
        if self._thread is not None and not self._closed:
            self._closed = True
            work = self._say_farewell(SystemExit("its torchrun was told to end"))
            with contextlib.suppress(HoldfastError, TimeoutError, RuntimeError):
                self._thread.run(asyncio.wait_for(work, DEFAULTS.torchrun_farewell_s))

    # ---- the event loop --------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            thread = LoopThread("holdfast-torchrun")
            try:
                thread.run(self._ledger.start())
            except BaseException:
                work.close()
                thread.stop()
                raise
            self._thread = thread
        return self._thread.run(work)


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    """Errors of ours, as torch's interface wants them."""
    try:
        yield
    except TooLate as error:
        raise RendezvousTimeoutError(str(error)) from None
    except (Retriable, UnknownOutcome) as error:
        raise RendezvousConnectionError(str(error)) from error
    except Gone as error:
        raise RendezvousStateError(str(error)) from error


def _detail(error: BaseException | None) -> str:
    """Why an agent ends, in one line."""
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        return f"rank {rank} ended with {failure.exitcode}, and the restarts are used up"
    if error is None:
        return "its agent was shut down before its workers had succeeded"
    name = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
    return f"{name}{error}".splitlines()[0]
