"""What a fleet does next: a pure function of its target and of what its replicas report.

One round brings one version to all replicas:

    staging  → everybody loads it aside and verifies it; what is served stays
    holding  → whoever serves what will not be allowed any more stops (without a mix: everybody)
    serving  → the version is what may be served; who has it switches, acknowledges, serves
    idle

A replica that could not load the version is not waited for: it is not offered to callers
(its version is not in `allowed`) until it has caught up. When too few could load it, or
somebody does not stop serving in time, the round fails and what was served is served on.

No round leaves `holding` out, not even when nobody seems to serve anything. Whoever takes the
next step compares the target only, not the members that it saw: somebody may have come back
since. While the target says `holding` such a one cannot begin with what will be forbidden;
and whoever began before is among the members that the next step waits for.

Every replica and the fleet's owner may take the next step: whoever sees first that the
rules are fulfilled changes the target, comparing it with what was read. So nobody's death
leaves a fleet on hold.
"""

from collections.abc import Iterable

import msgspec

from holdfast.weights.records import Consumer, Target

__all__ = ["advance", "begin", "offered", "servable"]


def begin(target: Target, version: int) -> Target:
    """The target of a new round."""
    return msgspec.structs.replace(
        target, round=target.round + 1, phase="staging", staging=version, problem=""
    )


def servable(target: Target) -> tuple[int, ...]:
    """What may be served now, the newest first."""
    if target.phase != "holding":
        return target.allowed
    following = _allowed_next(target)
    return tuple(version for version in target.allowed if version in following)


def advance(target: Target, members: Iterable[Consumer], waited_s: float) -> Target | None:
    """The next target, or None while there is something to wait for.

    `members` are the living ones; `waited_s` is how long the target has been as it is.
    """
    replicas = [member for member in members if member.address]
    if target.phase == "staging":
        return _staged(target, replicas, waited_s)
    if target.phase == "holding":
        return _held(target, replicas, waited_s)
    if target.phase == "serving":
        return _served(target, replicas, waited_s)
    return None


def _allowed_next(target: Target) -> tuple[int, ...]:
    """What will be allowed when this round has succeeded."""
    assert target.staging is not None
    older = [version for version in target.allowed if version != target.staging]
    return (target.staging, *older[: target.mix])


def _has(replica: Consumer, version: int | None) -> bool:
    return version is not None and version in (replica.staged, replica.acknowledged)


def _staged(target: Target, replicas: list[Consumer], waited_s: float) -> Target | None:
    waiting = [
        one for one in replicas if not _has(one, target.staging) and one.failed != target.staging
    ]
    if waited_s < target.stage_s and (waiting or not replicas):
        return None
    return _too_few(target, replicas) or msgspec.structs.replace(target, phase="holding")


def _held(target: Target, replicas: list[Consumer], waited_s: float) -> Target | None:
    following = _allowed_next(target)
    serving = [
        one
        for one in replicas
        if one.acknowledged is not None
        and one.acknowledged not in following
        and one.held != target.round
    ]
    too_few = _too_few(target, replicas)  # who had loaded it may have died since
    if not serving and too_few is None:
        return msgspec.structs.replace(target, phase="serving", staging=None, allowed=following)
    if waited_s < target.hold_s:
        return None
    if too_few is not None:
        return too_few
    names = ", ".join(one.name for one in serving)
    return _failed(target, f"{names} did not stop serving within {target.hold_s} s")


def _served(target: Target, replicas: list[Consumer], waited_s: float) -> Target | None:
    newest = target.allowed[0]
    switching = [one for one in replicas if one.staged == newest and one.acknowledged != newest]
    if switching and waited_s < target.hold_s:
        return None
    return msgspec.structs.replace(target, phase="idle")


def _too_few(target: Target, replicas: list[Consumer]) -> Target | None:
    """The failed round, when too few replicas have loaded its version."""
    others = [one for one in replicas if not _has(one, target.staging)]
    ready = len(replicas) - len(others)
    if ready >= target.least:
        return None
    reasons = "; ".join(
        f"{one.name}: {one.problem or 'did not load it in time'}" for one in others
    )
    return _failed(
        target,
        f"version {target.staging} was loaded by {ready} of {len(replicas)} replicas, "
        f"{target.least} are needed. {reasons}",
    )


def _failed(target: Target, problem: str) -> Target:
    return msgspec.structs.replace(target, phase="idle", staging=None, problem=problem[:2000])


def offered(target: Target, members: Iterable[Consumer], version: int | None) -> list[Consumer]:
    """The replicas that callers may ask now; with a version, those that serve just that."""
    allowed = servable(target)
    return [
        one
        for one in members
        if one.address
        and one.acknowledged in allowed
        and (version is None or one.acknowledged == version)
    ]
