"""Accounts and their API keys.

A key is `tml-<id>-<secret>` (the prefix is what the public SDKs ask for). The ledger holds the
id and the hash of the secret; the key itself is shown once. A secret has 192 random bits, so a
plain hash is enough; it is compared in constant time, and an unknown id costs as much as a
wrong secret. Keys are followed by watch, so making and revoking one needs no restart; an id
that is not known yet is looked up, once a second.
"""

import asyncio
import contextlib
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Callable

import msgspec

from holdfast.errors import Corrupt, Denied, Fenced, Mistake, NotFound
from holdfast.jobs.records import Account, ApiKey, Commands, Host, Keys, check_name
from holdfast.ledger.follow import Step, follow
from holdfast.ledger.records import KEEP, Verdict, decode, load, put, update
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, Entry, absent, unchanged
from holdfast.ledger.unreadable import Unreadable, readable, tell
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS

__all__ = ["Accounts", "Guests", "make_key", "split_key"]

TRUSTED = "all-accounts-are-trusted"
"""What `--allow-commands` says where there is more than one account."""
_AGAIN = Policy(attempts=16, base_s=0.0)
KEYS_MAX = 32
"""Keys of one account."""
_WAITING_MAX = 32
_KEY = re.compile(r"tml-([a-z0-9]{12})-([A-Za-z0-9]{32})")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_NOBODY = ApiKey(id="", sha256=hashlib.sha256(b"nobody").hexdigest())


def make_key(now: float, lives_s: float = 0.0) -> tuple[str, ApiKey]:
    """A new key: what its owner gets, and what is kept."""
    name = "".join(secrets.choice(_LETTERS[:26] + _LETTERS[-10:]) for _ in range(12))
    secret = "".join(secrets.choice(_LETTERS) for _ in range(32))
    kept = ApiKey(
        id=name,
        sha256=_hash(secret),
        created_at=now,
        expires_at=now + lives_s if lives_s else 0.0,
    )
    return f"tml-{name}-{secret}", kept


def split_key(key: str) -> tuple[str, str] | None:
    """Id and secret of a key, or None when it is none of ours."""
    found = _KEY.fullmatch(key)
    return (found[1], found[2]) if found else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Accounts:
    """Making accounts and keys, and taking keys back."""

    def __init__(self, runtime: Runtime, run: str, wall: Callable[[], float]) -> None:
        self._runtime = runtime
        self._keys = Keys(run)
        self._wall = wall

    async def all(self) -> list[Account]:
        """Every account that can be read, by name."""
        return [one for one in await self._each() if not isinstance(one, Unreadable)]

    async def unreadable(self) -> list[Unreadable]:
        """What cannot be read."""
        return [one for one in await self._each() if isinstance(one, Unreadable)]

    async def _each(self) -> list[Account | Unreadable]:
        found = await self._runtime.ledger.range(self._keys.accounts)
        return [_read(entry) for entry in found.entries]

    async def add_key(self, account: str, lives_s: float = 0.0) -> tuple[str, ApiKey]:
        """Make a key; the account is made with its first one."""
        check_name("account", account)
        if not (math.isfinite(lives_s) and lives_s >= 0):
            raise Mistake(f"a key lives for a number of seconds, 0 for ever, not {lives_s}")
        key, kept = make_key(self._wall(), lives_s)

        def decide(there: Account | None) -> Account:
            there = there or Account(name=account)
            if kept in there.keys:
                return there
            keys = tuple(one for one in there.keys if not self._is_over(one))
            if len(keys) >= KEYS_MAX:
                raise Mistake(f"{account} has {KEYS_MAX} keys: revoke one first")
            return msgspec.structs.replace(there, keys=(*keys, kept))

        async def add() -> None:
            await self._update(account, decide, await self._may_have_keys(account))

        # Fenced: what may have keys has just changed; look again.
        await _AGAIN.acall(add, on=Fenced, clock=self._runtime)
        return key, kept

    async def _may_have_keys(self, account: str) -> Compare:
        """True while this account may have keys. `Mistake` when it may not."""
        rule = await load(self._runtime.ledger, self._keys.commands, Commands)
        if rule is None:
            return absent(self._keys.commands)
        if rule.record.account not in ("", account):
            raise Mistake(
                f"the account {account} gets no key: jobs may bring their own commands here, so "
                f"{rule.record.account} could read and use it. Start `holdfast serve` without "
                f"--allow-commands, or with --allow-commands={TRUSTED}"
            )
        return unchanged(rule.entry)

    async def allow_commands(self, account: str) -> None:
        """Let jobs bring commands: those of this account, the only one; of all with "".

        The record is written before the accounts are read, and a key is made only over the record
        that was read: of two that meet, one sees the other.
        """
        await self._must_be_alone(account)
        record = put(self._keys.commands, Commands(account=account))
        txn = await self._runtime.ledger.txn([], [record])
        try:
            await self._must_be_alone(account)
        except Mistake:
            ours = Compare(self._keys.commands, "mod", "==", txn.revision)
            await self._runtime.ledger.txn([ours], [Delete(self._keys.commands)])
            raise

    async def _must_be_alone(self, account: str) -> None:
        others = [
            there.name
            for there in await self.all()
            if there.name != account and not all(map(self._is_over, there.keys))
        ]
        if account and others:
            raise Mistake(
                f"--allow-commands lets the jobs of one account read the ledger and use the keys "
                f"of the others, and there are others beside {account}: {', '.join(others[:5])}. "
                f"If all of them may do so, say --allow-commands={TRUSTED}; if not, revoke their "
                f"keys or give this service another --ledger"
            )

    async def forbid_commands(self) -> None:
        """Jobs bring no commands any more, unless a host that lives lets them."""
        rule = await load(self._runtime.ledger, self._keys.commands, Commands)
        hosts = await self._runtime.ledger.range(self._keys.hosts)
        if rule is not None and not any(map(_lets_commands, hosts.entries)):
            await self._runtime.ledger.txn([unchanged(rule.entry)], [Delete(self._keys.commands)])

    async def revoke(self, account: str, key_id: str) -> None:
        """Take a key back. It stops working as soon as gateways hear of it."""

        done = False

        def decide(there: Account | None) -> Account | Verdict:
            nonlocal done
            if there is None or all(one.id != key_id for one in there.keys):
                if done:
                    return KEEP  # an earlier attempt of ours, whose answer was lost
                raise NotFound(f"the account {account} has no key {key_id}")
            done = True
            left = tuple(one for one in there.keys if one.id != key_id)
            return msgspec.structs.replace(there, keys=left)

        await self._update(account, decide)

    async def set_default(self, account: str, job: str, *, instead_of: str = "") -> None:
        """Paths without a job's name lead to this job from now on, if they led to that one."""

        def decide(there: Account | None) -> Account | Verdict:
            there = there or Account(name=account)
            if there.default_job != instead_of:
                return KEEP
            return msgspec.structs.replace(there, default_job=job)

        await self._update(account, decide)

    async def _update(
        self,
        account: str,
        decide: Callable[[Account | None], Account | Verdict],
        *guards: Compare,
    ) -> None:
        place = self._keys.account(account)
        await update(self._runtime, place, Account, decide, guards=guards, repeatable=True)

    def _is_over(self, key: ApiKey) -> bool:
        return 0 < key.expires_at <= self._wall()


def _lets_commands(entry: Entry) -> bool:
    try:
        return decode(Host, entry).any_command
    except Corrupt:
        return True  # for all we know


class Guests:
    """Who may come in, followed: whose key is it?"""

    def __init__(self, runtime: Runtime, run: str, wall: Callable[[], float]) -> None:
        self._runtime = runtime
        self._keys = Keys(run)
        self._wall = wall
        self._accounts: dict[str, Account] = {}
        self._by_id: dict[str, tuple[str, ApiKey]] = {}
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._revision = 0
        self._waiting = 0
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Follow the accounts, for ever."""
        async with contextlib.aclosing(follow(self._runtime, self._keys.accounts)) as steps:
            async for step in steps:
                self._take(step)
                self.ready.set()

    def _take(self, step: Step) -> None:
        if step.revision < self._revision:
            return  # a reading that was overtaken by the watch
        self._revision = step.revision
        accounts = {}
        for entry in step.entries.values():
            account = _read(entry)
            if not isinstance(account, Unreadable):
                accounts[account.name] = account
        self._accounts = accounts
        self._by_id = {
            key.id: (account.name, key) for account in accounts.values() for key in account.keys
        }

    def known(self, key: str) -> str:
        """The account that a key belongs to, if it is valid as far as was heard; or nothing."""
        key_id, secret = split_key(key) or ("", "")
        account, kept = self._by_id.get(key_id, ("", _NOBODY))
        right = hmac.compare_digest(_hash(secret), kept.sha256)
        over = 0 < kept.expires_at <= self._wall()
        return account if right and not over else ""

    async def who(self, key: str) -> str:
        """The account that a key belongs to. Raises `Denied`, or `Retriable`: nobody knows now."""
        parts = split_key(key)
        if parts is None:
            raise Denied("this is not an API key of this service: it begins with tml-")
        if parts[0] not in self._by_id:
            await self._look()
        account = self.known(key)
        if not account:
            raise Denied("this API key is not known, or no longer valid")
        return account

    async def default_job(self, account: str) -> str:
        """The job that an account's paths without a job's name lead to, or nothing.

        That there is none is said only after a reading of the ledger.
        """
        there = self._accounts.get(account)
        if there is None or not there.default_job:
            entry = await self._runtime.ledger.get(self._keys.account(account))
            there = decode(Account, entry) if entry else None
        return there.default_job if there else ""

    async def _look(self) -> None:
        """Read the accounts once more: a key may be newer than what was heard.

        Once a second, for all who wait; when many do, it is not new keys that they bring.
        """
        if self._waiting >= _WAITING_MAX:
            return
        asked_at = self._runtime.now()
        self._waiting += 1
        try:
            async with self._looking:
                if self._looked_at >= asked_at:
                    return  # somebody else has looked meanwhile
                pause_s = self._looked_at + DEFAULTS.key_look_s - self._runtime.now()
                if pause_s > 0:
                    await self._runtime.sleep(pause_s)
                whole = await self._runtime.ledger.range(self._keys.accounts)
                self._looked_at = self._runtime.now()
                entries = {entry.key: entry for entry in whole.entries}
                self._take(Step(whole.revision, entries, None))
        finally:
            self._waiting -= 1


def _read(entry: Entry) -> Account | Unreadable:
    """An account; a record that says another name than its key opens no other account's door."""
    account = readable(Account, entry)
    if not isinstance(account, Unreadable) and not entry.key.endswith(f"/{account.name}"):
        return tell(entry, f"{entry.key} holds the record of another account")
    return account
