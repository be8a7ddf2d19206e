"""Every process of a run, and its lives. Pure.

A life begins when somebody says that it started the process, or with the first event that
the process itself writes. It ends when its owner says so, when the next life of the same
member begins, or when a new supervisor begins: nothing of an older one is alive then.
"""

import re

import msgspec

__all__ = ["Life", "Member", "Members", "node_name", "rank_name", "signal_name"]

MAX_LIVES = 200
MAX_MEMBERS = 300
_RANK = re.compile(r".* e(\d+)-c(\d+)-r(\d+)-(\d+)")
TRAINER, RANK = "trainer ", "trainer rank "
_ORDER = ("supervisor", "orchestrator", "host", "gateway", "trainer", "replica", "chaos")


class Life(msgspec.Struct):
    """One process: from when to when, and how it ended ('' while it lives)."""

    pid: int
    began: float
    seen: float
    ended: float | None = None
    how: str = ""
    """died, ended (as it should), stopped (because of others), lost (nobody saw how)"""
    code: int | None = None
    after_s: float | None = None
    """How long its member had been down."""
    crew: str = ""
    """The epoch and cycle of a trainer's rank: ranks of another crew are not alive."""


class Member(msgspec.Struct):
    """A process by its name, through all its lives (the last `MAX_LIVES` are kept)."""

    name: str
    lives: list[Life] = []
    deaths: int = 0
    starts: int = 0
    version: int | None = None

    @property
    def life(self) -> Life | None:
        """The life that it lives now."""
        return self.lives[-1] if self.lives and self.lives[-1].ended is None else None

    @property
    def state(self) -> str:
        """up, down or ended"""
        if self.life is not None:
            return "up"
        return "ended" if self.lives and self.lives[-1].how == "ended" else "down"


class Members:
    """All of them, by name and by process id."""

    def __init__(self) -> None:
        self.known: dict[str, Member] = {}
        self.spares: dict[int, int] = {}
        """Interpreters that are kept warm, with the process that keeps each."""
        self._at: dict[int, str] = {}  # whose life a living pid is

    def name_of(self, pid: int) -> str:
        """The member that lives with this pid, or ''."""
        return self._at.get(pid, "")

    def find(self, target: str) -> str:
        """The member that somebody calls so: replica0 is replica-0. '' if there is none."""
        wanted = _letters(target)
        return next((name for name in self.known if _letters(name) == wanted), "")

    def life_of(self, pid: int) -> Life | None:
        """The life that has this pid now."""
        return self.known[self._at[pid]].life if pid in self._at else None

    def seen(self, process: str, pid: int, at: float) -> str:
        """A process has written an event. Returns the member that is alive again by it, or ''."""
        life, again = self.life_of(pid), ""
        if life is None:
            self._revive(process, pid, at)
            life = self.life_of(pid)
        fresh = life is None and pid > 0 and process != "" and not self._had(process, pid)
        crew = _crew(process)
        if crew and (fresh or (life is not None and not life.crew)):
            self._end_other_crews(crew)
        if fresh:
            name = _member_name(process)
            life = self.start(name, pid, at)
            again = name if life is not None and life.after_s is not None else ""
        if life is not None:
            life.seen = max(life.seen, at)
            life.crew = crew or life.crew
        return again

    def _end_other_crews(self, crew: str) -> None:
        """Ranks of another crew are gone, since when any of them was last heard of."""
        heard: dict[str, float] = {}
        for member in self.known.values():
            for one in member.lives[-2:]:
                heard[one.crew] = max(heard.get(one.crew, 0.0), one.seen, one.ended or 0.0)
        for pid in list(self._at):
            life = self.life_of(pid)
            if life is not None and life.crew not in ("", crew):
                self.end(pid, heard[life.crew], "stopped")

    def _revive(self, process: str, pid: int, at: float) -> None:
        """Who was thought to have died with the supervisor, and writes on, has not."""
        member = self.known.get(_member_name(process))
        life = member.lives[-1] if member is not None and member.lives else None
        if member is None or life is None or life.pid != pid or life.how != "lost":
            return
        if life.ended is not None and at > life.ended:
            life.ended, life.how, life.seen = None, "", at
            member.deaths -= 1
            self._at[pid] = member.name

    def start(self, name: str, pid: int, at: float) -> Life | None:
        """A member has a new life; None if it has no name, or there is no place for more."""
        life = self.life_of(pid)
        if life is not None and self._at[pid] == name:
            return life
        if not name or (name not in self.known and len(self.known) >= MAX_MEMBERS):
            return None
        if life is not None:
            self.end(pid, at, "lost")
        member = self.known.setdefault(name, Member(name))
        if member.life is not None:
            self.end(member.life.pid, min(at, member.life.seen), "lost")
        began = Life(pid, at, at)
        if member.lives and member.lives[-1].ended is not None:
            began.after_s = max(0.0, at - member.lives[-1].ended)
        member.lives.append(began)
        member.starts += 1
        del member.lives[:-MAX_LIVES]
        self._at[pid] = name
        self.spares.pop(pid, None)
        return began

    def end(self, pid: int, at: float, how: str, code: int | None = None) -> None:
        """The life with this pid is over."""
        life = self.life_of(pid)
        name = self._at.pop(pid, "")
        if life is None:
            return
        life.ended, life.how, life.code = max(at, life.began), how, code
        self.spares = {spare: owner for spare, owner in self.spares.items() if owner != pid}
        member = self.known[name]
        member.deaths += how in ("died", "lost")
        if how != "ended":
            member.version = None

    def died(self, name: str, pid: int, at: float, code: int) -> None:
        """An owner says that it has ended; it may be known to be dead already."""
        if self._at.get(pid):
            self.end(pid, at, "died", code)
            return
        member = self.known.get(name)
        for life in reversed(member.lives if member is not None else []):
            if life.pid == pid:
                life.how, life.code = "died", code
                return

    def end_all(self, at: float, how: str, but: int = 0) -> None:
        """Every life is over, but for one pid."""
        for pid in [pid for pid in self._at if pid != but]:
            self.end(pid, at, how)
        self.spares.clear()

    def last_of_ranks(self) -> float:
        """When any rank of the trainer was last heard of, or seen to end."""
        lives = [one.lives[-1] for name, one in self.known.items() if name.startswith(RANK)]
        return max((max(life.seen, life.ended or 0.0) for life in lives), default=0.0)

    def end_trainer(self, at: float, how: str) -> None:
        """The trainer's nodes and ranks are gone: with their host, or one by one before."""
        for pid, name in list(self._at.items()):
            if name.startswith(TRAINER):
                self.end(pid, at, how)

    def sorted(self) -> list[Member]:
        """In the order in which people look for them."""

        def place(member: Member) -> tuple[int, str]:
            for number, word in enumerate(_ORDER):
                if member.name.startswith(word):
                    return number, member.name
            return len(_ORDER), member.name

        return sorted(self.known.values(), key=place)

    def _had(self, process: str, pid: int) -> bool:
        """Whether this was a life that is over: its last lines may come late."""
        member = self.known.get(_member_name(process))
        return member is not None and any(life.pid == pid for life in member.lives)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def rank_name(rank: int) -> str:
    """The member that is a rank of the trainer."""
    return f"{RANK}{rank}"


def node_name(node: str) -> str:
    """The member that is a node of the trainer."""
    return f"{TRAINER}node {node}"


def _crew(process: str) -> str:
    match = _RANK.fullmatch(process)
    return f"{match[1]}.{match[2]}" if match else ""


def _member_name(process: str) -> str:
    """A trainer's rank names itself anew in each life; its member is the rank."""
    match = _RANK.fullmatch(process)
    return rank_name(int(match[3])) if match else process


def signal_name(code: int | None) -> str:
    """An exit code for people."""
    if code is None:
        return "nobody saw how"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
