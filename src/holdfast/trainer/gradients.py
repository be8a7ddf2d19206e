"""The loss of a batch and its gradient: cut into shards, computed by several ranks, put together.

- A batch is cut into a fixed number of shards, whatever the number of ranks. Each shard's
  gradient is computed by one rank and sent to all; every rank adds them up in the order of the
  shards: the same bits with 1, 2 and 4 ranks. With `exact=False` each rank adds up its own
  shards, and one all-reduce does the rest.
- A shard is computed in batches of bounded size. How it is cut is a function of the data alone.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.base import Tenant
from holdfast.engine.scoring import token_logprobs
from holdfast.trainer import losses, ops
from holdfast.trainer.ranks import Ranks

__all__ = ["SHARDS", "Gradients", "Outputs", "batches", "losses_of", "tell"]

SHARDS = 4
BATCH_TOKENS = 16_384
"""Tokens, with padding, that are computed at once."""
METRICS = ("loss:sum", "clipped_tokens:sum")
"""What ranks tell each other of a datum."""
FIELDS = ("logprobs", "elementwise_loss")
"""What the caller is told of every token of a datum: sums of the second are the loss."""

Outputs = dict[str, Tensor]


@dataclass
class _Shard:
    """What one shard gives: its gradient as one vector, its outputs, its metrics."""

    gradient: Tensor
    outputs: list[Outputs]
    metrics: list[dict[str, float]]


class Gradients:
    """Computes with all ranks; every rank gets the same."""

    def __init__(self, ranks: Ranks, *, exact: bool) -> None:
        self._ranks = ranks
        self._exact = exact

    def gather(
        self, tenant: Tenant, op: ops.ForwardBackward, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Outputs], list[dict[str, float]]]:
        """Compute our shards, exchange them, and put all of them together in order."""
        size = sum(one.numel() for one in parameters.values())
        cuts = [len(op.data) * at // SHARDS for at in range(SHARDS + 1)]
        shards = [op.data[a:b] for a, b in itertools.pairwise(cuts)]
        total = torch.zeros(size)
        outputs: list[Outputs] = []
        metrics: list[dict[str, float]] = []
        mine = {
            at: self._compute(tenant, op, shard, parameters)
            for at, shard in enumerate(shards)
            if shard and at % self._ranks.size == self._ranks.rank
        }
        for at, shard in enumerate(shards):
            if not shard:
                continue
            done = self._exchange(mine.get(at), shard, size, at % self._ranks.size)
            if self._exact:
                total += done.gradient
            outputs.extend(done.outputs)
            metrics.extend(done.metrics)
        if not self._exact:
            for done in mine.values():
                total += done.gradient
            total = self._ranks.total(total)
        return total, outputs, metrics

    def _exchange(
        self, mine: _Shard | None, shard: Sequence[ops.Datum], size: int, owner: int
    ) -> _Shard:
        """A shard as its owner has it, on every rank."""
        if self._ranks.size == 1:
            assert mine is not None
            return mine
        known = (mine.outputs, mine.metrics) if mine is not None else None
        outputs, metrics = tell(self._ranks, shard, known, owner)
        gradient = mine.gradient if mine is not None else torch.empty(size)
        if self._exact:
            gradient = self._ranks.spread(gradient, owner)
        return _Shard(gradient, outputs, metrics)

    def _compute(
        self,
        tenant: Tenant,
        op: ops.ForwardBackward,
        shard: Sequence[ops.Datum],
        parameters: Mapping[str, Tensor],
    ) -> _Shard:
        size = sum(one.numel() for one in parameters.values())
        gradient = torch.zeros(size)
        outputs: list[Outputs] = []
        metrics: list[dict[str, float]] = []
        with torch.set_grad_enabled(bool(parameters)):
            for batch in batches(shard):
                total, scored, told = losses_of(tenant, op, batch)
                outputs += scored
                metrics += told
                if parameters:
                    found = torch.autograd.grad(
                        total, list(parameters.values()), allow_unused=True
                    )
                    gradient += _flat(found, parameters)
        return _Shard(gradient, outputs, metrics)


def losses_of(
    tenant: Tenant, op: ops.ForwardBackward, batch: Sequence[ops.Datum]
) -> tuple[Tensor, list[Outputs], list[dict[str, float]]]:
    """The loss of a batch, and of each datum what is told of its tokens, and the metrics."""
    total = torch.zeros(())
    outputs: list[Outputs] = []
    metrics: list[dict[str, float]] = []
    for datum, values in zip(batch, _score(tenant, batch), strict=True):
        mine, told = losses.token_losses(op.loss, values, losses.inputs_of(datum), op.config)
        total = total + mine.sum()
        metrics.append(told)
        found = zip(FIELDS, (values, mine), strict=True)
        outputs.append({name: one.detach().float().cpu() for name, one in found})
    return total, outputs, metrics


def tell(
    ranks: Ranks,
    shard: Sequence[ops.Datum],
    known: tuple[list[Outputs], list[dict[str, float]]] | None,
    owner: int,
) -> tuple[list[Outputs], list[dict[str, float]]]:
    """The outputs and the metrics of a shard as its owner has them, on every rank."""
    shapes = [(len(FIELDS), *datum.inputs["target_tokens"].shape) for datum in shard]
    sizes = [int(np.prod(shape)) for shape in shapes]
    if known is not None:
        flat = torch.cat([one[name].reshape(-1) for one in known[0] for name in FIELDS])
        table = _table(known[1])
    else:
        flat = torch.empty(sum(sizes))
        table = torch.empty(len(shard), 2 * len(METRICS), dtype=torch.float64)
    parts = torch.split(ranks.spread(flat, owner), sizes)
    outputs = [
        dict(zip(FIELDS, part.reshape(shape), strict=True))
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return outputs, _metrics(ranks.spread(table, owner))


def _score(tenant: Tenant, batch: Sequence[ops.Datum]) -> list[Tensor]:
    """The log probabilities of every datum's targets, each in the shape of its targets."""
    rows = [np.frombuffer(datum.tokens, "<i4") for datum in batch]
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[at, : len(row)] = 1
    logits = tenant.logits(tokens, mask)
    wanted = [torch.from_numpy(one.inputs["target_tokens"].array().copy()) for one in batch]
    if all(one.ndim == 1 for one in wanted):  # at once: cutting logits up costs a copy each
        targets = torch.zeros_like(tokens)
        for at, one in enumerate(wanted):
            targets[at, : len(one)] = one
        whole = token_logprobs(logits, targets.to(logits.device)).unbind()
        return [values[: len(row)] for values, row in zip(whole, rows, strict=True)]
    scored = []
    for row, one, mine in zip(rows, wanted, logits.unbind(), strict=True):
        mine = mine[: len(row)]
        if one.ndim == 2:
            mine = mine.unsqueeze(1).expand(-1, one.shape[1], -1)
        scored.append(token_logprobs(mine, one.to(logits.device)))
    return scored


def batches(shard: Sequence[ops.Datum]) -> list[list[ops.Datum]]:
    """Cut a shard into batches of bounded size, in order: a function of the data alone."""
    found: list[list[ops.Datum]] = []
    longest = 0
    for datum in shard:
        length = len(datum.tokens) // 4
        longest = max(longest, length)
        if not found or longest * (len(found[-1]) + 1) > BATCH_TOKENS:
            found.append([])
            longest = length
        found[-1].append(datum)
    return found


def _flat(found: Sequence[Tensor | None], parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(one) if grad is None else grad).reshape(-1).float().cpu()
            for grad, one in zip(found, parameters.values(), strict=True)
        ]
    )


def _table(metrics: Sequence[Mapping[str, float]]) -> Tensor:
    """Metrics as numbers: for each name whether it is there, and its value."""
    rows = [
        [*(float(name in one) for name in METRICS), *(one.get(name, 0.0) for name in METRICS)]
        for one in metrics
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _metrics(table: Tensor) -> list[dict[str, float]]:
    """What `_table` wrote."""
    found = []
    for row in table.tolist():
        there, values = row[: len(METRICS)], row[len(METRICS) :]
        triples = zip(METRICS, there, values, strict=True)
        found.append({name: value for name, is_there, value in triples if is_there})
    return found
