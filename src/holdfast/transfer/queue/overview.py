"""A queue at one moment, for people."""

import msgspec

from holdfast.ledger import open as open_ledger
from holdfast.ledger.follow import Step
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.transfer.queue.plan import Plan
from holdfast.transfer.queue.records import Keys, Member
from holdfast.transfer.queue.view import View

__all__ = ["MemberLine", "Overview", "TaskLine", "names", "overview"]


class TaskLine(msgspec.Struct, frozen=True):
    """Where the samples are in one task, of those that are not finished by all."""

    name: str
    needs: tuple[str, ...]
    waiting: int
    """Some field that the task needs is not there yet."""
    free: int
    claimed: int
    done: int


class MemberLine(msgspec.Struct, frozen=True):
    """One life of a producer or consumer."""

    id: str
    pid: int
    host: str
    claims: dict[str, int]


class Overview(msgspec.Struct, frozen=True):
    """A queue at one moment."""

    samples: int
    nbytes: int
    blocks: int
    ever: int
    newest: int
    max_samples: int
    max_bytes: int
    tasks: list[TaskLine]
    members: list[MemberLine]


async def names(url: str, run: str) -> list[str]:
    """The queues of a run."""
    prefix = Keys(run, "x").prefix.removesuffix("x/")
    async with open_ledger(url) as ledger:
        entries = (await ledger.range(prefix)).entries
    found = (entry.key.removeprefix(prefix).partition("/") for entry in entries)
    return [name for name, _, rest in found if rest == "config"]


async def overview(url: str, run: str, name: str) -> Overview | None:
    """What there is, or None when there is no such queue."""
    keys = Keys(run, name)
    async with open_ledger(url) as ledger:
        whole = await ledger.range(keys.prefix)
    view = View(keys)
    view.apply(Step(whole.revision, {entry.key: entry for entry in whole.entries}, None))
    config, plan = view.config, Plan()
    if config is None:
        return None
    tasks = []
    claims: dict[str, dict[str, int]] = {member: {} for member in view.members}
    for task, needs in config.tasks.items():
        waiting = free = claimed = done = 0
        for block in view.blocks.values():
            state = block.task(task)
            held = state.claimed(view.members)
            open_now = block.all & ~state.finished
            waiting += (open_now & ~block.ready(needs)).bit_count()
            free += plan.free(view, block, task).bit_count()
            claimed += held.bit_count()
            done += (state.finished & block.all).bit_count()
            for claim, places in state.claims:
                if claim.owner in claims:
                    mine = claims[claim.owner]
                    mine[task] = mine.get(task, 0) + places.bit_count()
        tasks.append(TaskLine(task, needs, waiting, free, claimed, done))
    members = []
    for entry in whole.entries:
        if entry.key.startswith(f"{keys.prefix}member/"):
            member, known = entry.key.rpartition("/")[2], readable(Member, entry)
            if isinstance(known, Unreadable):
                known = Member(pid=0, host="UNREADABLE")
            members.append(MemberLine(member, known.pid, known.host, claims.get(member, {})))
    return Overview(
        view.living(),
        view.nbytes(),
        len(view.blocks),
        view.head.samples,
        view.head.newest,
        config.max_samples,
        config.max_bytes,
        tasks,
        members,
    )
