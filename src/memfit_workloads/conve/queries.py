"""Queries (head, relation) with the tails that answer them: training rows and the ranking filter.

Inverse relations turn head prediction into tail prediction: relation r + num_relations is the
inverse of r. Shape suffixes: B rows of a batch, T answers per row, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


class QueryBatch(NamedTuple):
    """Rows to train on."""

    heads: Tensor
    """(B,) int64."""
    relations: Tensor
    """(B,) int64, inverse relations included."""
    positives: Tensor
    """(B, T) int64, padded with -1."""


def with_inverses(triples: Tensor, num_relations: int) -> Tensor:
    """Append each triple's inverse: (n, 3) to (2n, 3)."""
    head, relation, tail = triples.unbind(dim=1)
    inverse = torch.stack([tail, relation + num_relations, head], dim=1)
    return torch.cat([triples, inverse])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queries:
    """Queries, sorted by (head, relation), and the tails of each in ``tails[offsets[i]:...]``."""

    heads: Tensor
    relations: Tensor
    offsets: Tensor
    """(Q + 1,)."""
    tails: Tensor
    num_relations: int
    """Inverse relations included."""

    @classmethod
    def grouped(cls, triples: Tensor, num_relations: int) -> Self:
        """Gather the distinct tails of every distinct (head, relation), inverses included."""
        triples = torch.unique(with_inverses(triples, num_relations), dim=0)
        pairs, counts = torch.unique_consecutive(triples[:, :2], dim=0, return_counts=True)
        return cls(
            heads=pairs[:, 0].contiguous(),
            relations=pairs[:, 1].contiguous(),
            offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            tails=triples[:, 2].contiguous(),
            num_relations=2 * num_relations,
        )

    @classmethod
    def one_per_triple(cls, triples: Tensor, num_relations: int) -> Self:
        """Make each triple, and its inverse, a row of its own whose tail is the only answer."""
        triples = with_inverses(triples, num_relations)
        return cls(
            heads=triples[:, 0].contiguous(),
            relations=triples[:, 1].contiguous(),
            offsets=torch.arange(len(triples) + 1),
            tails=triples[:, 2].contiguous(),
            num_relations=2 * num_relations,
        )

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def most_answers(self) -> int:
        """Return the largest number of tails that one query has."""
        return int(self.offsets.diff().max())

    def batch(self, rows: Tensor) -> QueryBatch:
        """Cut the given rows out, with answers padded to the longest among them."""
        counts = self.offsets[rows + 1] - self.offsets[rows]
        column = torch.arange(int(counts.max()))
        is_answer = column < counts[:, None]
        place = (self.offsets[rows, None] + column).clamp_(max=len(self.tails) - 1)
        positives = self.tails[place].masked_fill_(~is_answer, -1)
        return QueryBatch(self.heads[rows], self.relations[rows], positives)

    def largest_batch(self, num_rows: int) -> QueryBatch:
        """Make a batch with as many answers per row as any batch can have."""
        rows = torch.arange(num_rows) % len(self)
        positives = torch.full((num_rows, self.most_answers), -1)
        positives[:, 0] = 0
        return QueryBatch(self.heads[rows], self.relations[rows], positives)

    def answers(self, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """List every answer to the given queries, all of which must be known.

        Returns:
            Two (n,) tensors: the position of the query among those given, and a tail of it.
        """
        known = self.heads * self.num_relations + self.relations
        rows = torch.searchsorted(known, heads * self.num_relations + relations)
        counts = self.offsets[rows + 1] - self.offsets[rows]
        position = torch.repeat_interleave(torch.arange(len(rows)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within = torch.arange(len(position)) - first
        return position, self.tails[self.offsets[rows][position] + within]


def batch_rows(order: Tensor, batch_size: int) -> list[Tensor]:
    """Cut an order of rows into batches; none is left out and none has a single row.

    Batch normalisation cannot train on one row, so a lone last row gets one from the batch before;
    ``batch_size`` is at least 3, so that the batch before can spare it.
    """
    batches = list(order.split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [order[-batch_size - 1 : -2], order[-2:]]
    return batches
