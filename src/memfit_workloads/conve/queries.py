"""Queries (head, relation) with the tails that answer them: training rows and the ranking filter.

Inverse relations turn head prediction into tail prediction: relation r + num_relations is the
inverse of r. Shape suffixes: B rows, T answers per row, Q queries, n answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_LARGEST_NUMBER = 2**63 - 1


def with_inverses(triples: Tensor, num_relations: int) -> Tensor:
    """Append each triple's inverse: (n, 3) to (2n, 3)."""
    head, relation, tail = triples.unbind(dim=1)
    inverse = torch.stack([tail, relation + num_relations, head], dim=1)
    return torch.cat([triples, inverse])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queries:
    """Queries, sorted by (head, relation), and the tails of each in ``tails[offsets[i]:...]``."""

    keys: Tensor
    """(Q,) int64: head x num_relations + relation; in rising order where queries are grouped."""
    offsets: Tensor
    """(Q + 1,)."""
    tails: Tensor
    num_relations: int
    """Inverse relations included."""

    @classmethod
    def grouped(cls, triples: Tensor, num_relations: int) -> Self:
        """Gather the distinct tails of every distinct (head, relation), inverses included."""
        pairs, tails = _distinct(with_inverses(triples, num_relations), 2 * num_relations)
        pairs, counts = torch.unique_consecutive(pairs, return_counts=True)
        return cls(
            keys=pairs,
            offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            tails=tails,
            num_relations=2 * num_relations,
        )

    @classmethod
    def one_per_triple(cls, triples: Tensor, num_relations: int) -> Self:
        """Make each triple, and its inverse, a row of its own whose tail is the only answer."""
        triples = with_inverses(triples, num_relations)
        return cls(
            keys=triples[:, 0] * (2 * num_relations) + triples[:, 1],
            offsets=torch.arange(len(triples) + 1),
            tails=triples[:, 2].contiguous(),
            num_relations=2 * num_relations,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def most_answers(self) -> int:
        """Return the largest number of tails that one query has."""
        return int(self.offsets.diff().max())

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return head and relation of the given rows: two (B,) int64."""
        keys = self.keys[rows]
        return keys // self.num_relations, keys % self.num_relations

    def num_answers(self, rows: Tensor) -> Tensor:
        """Count the tails of the given rows: (B,) to (B,)."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def padded_answers(self, rows: Tensor) -> Tensor:
        """List the tails of the given rows: (B, T), padded with -1 to the longest among them."""
        counts = self.num_answers(rows)
        column = torch.arange(int(counts.max()))
        is_answer = column < counts[:, None]
        place = (self.offsets[rows, None] + column).clamp_(max=len(self.tails) - 1)
        return self.tails[place].masked_fill_(~is_answer, -1)

    def listed_answers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """List the tails of the given rows one after the other.

        Returns:
            Two (n,) tensors: the position of the row among those given, and a tail of it.
        """
        counts = self.num_answers(rows)
        position = torch.repeat_interleave(torch.arange(len(rows)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within = torch.arange(len(position)) - first
        return position, self.tails[self.offsets[rows][position] + within]

    def rows_of(self, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """Look queries up: (B,) and (B,) to their rows, and whether they are known at all."""
        wanted = heads * self.num_relations + relations
        rows = torch.searchsorted(self.keys, wanted).clamp_(max=len(self) - 1)
        return rows, self.keys[rows] == wanted

    def answers(self, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """List every answer to the given queries, all of which must be known.

        Returns:
            Two (n,) tensors: the position of the query among those given, and a tail of it.
        """
        rows, _ = self.rows_of(heads, relations)
        return self.listed_answers(rows)


def _distinct(triples: Tensor, num_relations: int) -> tuple[Tensor, Tensor]:
    """Sort triples (n, 3), and leave out what is there already.

    Returns:
        (m,) head x num_relations + relation, and (m,) tails. Sorting takes about 24 bytes a triple.
    """
    heads, relations, tails = triples.unbind(dim=1)
    width = int(tails.max()) + 1 if len(tails) else 1
    num_heads = int(heads.max()) + 1 if len(heads) else 1
    if num_heads * num_relations * width > _LARGEST_NUMBER:  # too large for one number each
        heads, relations, tails = torch.unique(triples, dim=0).unbind(dim=1)
        return heads * num_relations + relations, tails
    keys = heads * num_relations
    keys.add_(relations).mul_(width).add_(tails)
    keys = torch.unique_consecutive(keys.sort().values)
    return keys // width, keys % width
