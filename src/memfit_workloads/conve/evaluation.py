"""Filtered ranking: where the true entity stands among all entities that are not known answers.

Shape suffixes: B queries, N entities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.errors import MemfitError
from memfit.units import MIB

from .data import Graph
from .model import ConvE
from .queries import Queries, with_inverses
from .sizes import ConvESizes

_LARGEST_BATCH = 1024
_BYTES_LIMIT = 64 * MIB


def ranks_of(scores: Tensor, targets: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
    """Rank each target among the entities that are not known answers, ties at their mean.

    Known answers other than the target are taken out of the race. The mean of the ranks that
    equal scores could have keeps a model that scores everything alike from looking good or bad.

    Args:
        scores: (B, N), overwritten.
        targets: (B,).
        known: (n,) rows and (n,) entities of known answers, the targets among them.

    Returns:
        (B,) float64, from 1.
    """
    target_scores = scores.gather(1, targets[:, None])
    scores.index_put_(known, scores.new_full((), -torch.inf))
    num_higher = (scores > target_scores).sum(dim=1)
    num_equal = (scores == target_scores).sum(dim=1)
    return 1.0 + num_higher.double() + 0.5 * num_equal.double()


def metrics_of(ranks: Tensor) -> dict[str, float]:
    """Return mean rank, mean reciprocal rank and hits at 1, 3 and 10."""
    return {
        "mr": ranks.mean().item(),
        "mrr": ranks.reciprocal().mean().item(),
        **{f"hits_at_{k}": (ranks <= k).double().mean().item() for k in (1, 3, 10)},
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Rank triples of a graph against all its known triples: train, valid and test."""

    graph: Graph
    known: Queries
    batch_size: int

    @classmethod
    def of(cls, graph: Graph, sizes: ConvESizes, free_bytes: int | None = None) -> Evaluation:
        """Prepare the filter, and pick a batch that stays below 64 MiB and ``free_bytes``."""
        everything = torch.cat([graph.train, graph.valid, graph.test])
        known = Queries.grouped(everything, graph.num_relations)
        return cls(graph=graph, known=known, batch_size=evaluation_batch_size(sizes, free_bytes))

    def metrics(self, model: ConvE, triples: Tensor) -> dict[str, Any]:
        """Return the metrics of tail side, head side and both together.

        Raises:
            MemfitError: if the model scores a triple with NaN or infinity.
        """
        queries = with_inverses(triples, self.graph.num_relations)
        with _evaluating(model):
            ranks = torch.cat([self._ranks(model, part) for part in queries.split(self.batch_size)])
        tail_ranks, head_ranks = ranks.chunk(2)
        return {
            "both": metrics_of(ranks),
            "tail": metrics_of(tail_ranks),
            "head": metrics_of(head_ranks),
            "num_triples": len(triples),
        }

    def _ranks(self, model: ConvE, queries: Tensor) -> Tensor:
        device = model.entity_bias.device
        heads, relations, targets = queries.unbind(dim=1)
        scores = model(heads.to(device), relations.to(device))
        self._check_finite(scores, queries)
        rows, entities = self.known.answers(heads, relations)
        known = (rows.to(device), entities.to(device))
        return ranks_of(scores, targets.to(device), known).cpu()

    def _check_finite(self, scores: Tensor, queries: Tensor) -> None:
        """Refuse to rank by scores that are no numbers: comparisons with NaN give rank 1."""
        is_finite = scores.sum(dim=1).isfinite()
        if is_finite.all():
            return
        is_finite = scores.isfinite().all(dim=1)
        if is_finite.all():
            return  # finite scores whose sum overflows
        head, relation, tail = queries[int((~is_finite).nonzero()[0])].tolist()
        if relation >= self.graph.num_relations:
            head, relation, tail = tail, relation - self.graph.num_relations, head
        msg = (
            f"The model scores the triple {self.graph.triple_name(head, relation, tail)} with NaN "
            "or infinity, so it has no rank. Training has diverged: lower --learning-rate, or "
            "leave out --use-mixed-precision."
        )
        raise MemfitError(msg)


def evaluation_batch_size(sizes: ConvESizes, free_bytes: int | None = None) -> int:
    """Return the largest batch whose scores and feature maps stay below 64 MiB and ``free_bytes``.

    A row takes two float32 and two boolean buffers of N entries, and up to three float32 buffers
    of its feature maps.
    """
    row_bytes = 10 * sizes.num_entities + 12 * sizes.num_features
    limit_bytes = _BYTES_LIMIT if free_bytes is None else min(_BYTES_LIMIT, free_bytes)
    return max(1, min(_LARGEST_BATCH, limit_bytes // row_bytes))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Turn dropout, batch statistics and gradients off, and put the model's mode back after."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
