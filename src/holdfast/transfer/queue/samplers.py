"""Samplers: which of the samples that could be claimed are claimed. Pure.

A sampler gets the samples that are free, oldest first, and how many are wanted. It returns
those it wants (in the order in which the batch shall have them), or fewer, or none, when
what it looks for is not there yet: the claim then waits. It may stop looking at any time.

    def longest(samples, n):
        return sorted(samples, key=lambda one: -one.tags["length"])[:n]
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from holdfast.errors import Mistake
from holdfast.transfer.queue.records import Sample

__all__ = ["Sampler", "balanced", "in_order", "weighted", "whole_groups"]

Sampler = Callable[[Iterable[Sample], int], Sequence[Sample]]


def in_order(samples: Iterable[Sample], n: int) -> Sequence[Sample]:
    """The oldest first."""
    return list(islice(samples, n))


def whole_groups(size: int) -> Sampler:
    """Groups of `size` samples, whole ones only, the one that was complete first, first.

    `n` must be a multiple of `size`. Samples without a group are never taken.
    """
    if size < 1:
        raise Mistake(f"a group has 1 or more samples, not {size}")

    def sample(samples: Iterable[Sample], n: int) -> Sequence[Sample]:
        if n % size:
            raise Mistake(f"{n} samples are not a whole number of groups of {size}")
        taken: list[Sample] = []
        groups: dict[str, list[Sample]] = {}
        for one in samples:
            if not one.group:
                continue
            group = groups.setdefault(one.group, [])
            group.append(one)
            if len(group) == size:
                taken += group
                if len(taken) == n:
                    break
        return taken

    return sample


def weighted(tag: str, *, most: bool = True) -> Sampler:
    """Those whose tag has the largest numbers (or the smallest). Without the tag: 0."""

    def sample(samples: Iterable[Sample], n: int) -> Sequence[Sample]:
        pick = heapq.nlargest if most else heapq.nsmallest
        return pick(n, samples, key=lambda one: _number(one, tag))

    return sample


def balanced(tag: str, parts: int) -> Sampler:
    """The oldest `n`, in an order in which each of `parts` equal runs has about the same sum.

    For data-parallel ranks: rank r takes run r, and no rank gets all the long sequences.
    """
    if parts < 1:
        raise Mistake(f"there are 1 or more parts, not {parts}")

    def sample(samples: Iterable[Sample], n: int) -> Sequence[Sample]:
        if n % parts:
            raise Mistake(f"{n} samples cannot be divided into {parts} equal parts")
        found = list(islice(samples, n))
        if len(found) < n:
            return found
        runs: list[list[Sample]] = [[] for _ in range(parts)]
        loads = [(0.0, part) for part in range(parts)]
        for one in sorted(found, key=lambda one: -_number(one, tag)):
            load, part = heapq.heappop(loads)
            runs[part].append(one)
            if len(runs[part]) < n // parts:
                heapq.heappush(loads, (load + _number(one, tag), part))
        return [one for run in runs for one in run]

    return sample


def _number(sample: Sample, tag: str) -> float:
    value = sample.tags.get(tag, 0)
    if not isinstance(value, int | float):
        raise Mistake(f"the tag {tag} of {sample.key} is {value!r}, not a number")
    return float(value)
