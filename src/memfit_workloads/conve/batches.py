"""Cuts queries into batches, and lists what answers them in the form that takes the least memory.

Shape suffixes: B rows of a batch, T answers per row, P pairs of a row and an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from memfit.losses import PositivePairs
from memfit.units import MIB

from .queries import Queries

_MOST_PADDED_BYTES = 64 * MIB
"""Where padded lists of answers could take more, pairs are made."""
_MOST_SWAPS = 1000


class QueryBatch(NamedTuple):
    """Rows to train on."""

    heads: Tensor
    """(B,) int64."""
    relations: Tensor
    """(B,) int64, inverse relations included."""
    positives: Tensor | PositivePairs
    """(B, T) int64, padded with -1; or P pairs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryBatches:
    """Batches of queries.

    Padded lists are as wide as the longest. In a large graph a few entities have 100,000 answers
    and most have one, so there all batches have the same number of pairs.
    """

    queries: Queries
    batch_size: int
    num_pairs: int | None
    """How many pairs each batch has; None where answers are padded lists."""

    @classmethod
    def of(cls, queries: Queries, batch_size: int, seed: int) -> Self:
        """Choose the form.

        Args:
            queries: the rows to train on.
            batch_size: rows in a batch; at least 3.
            seed: of the orders of all epochs. The largest batch of the first is the largest of
                all: `cut` sees to that.
        """
        padded_bytes = 8 * queries.most_answers * min(batch_size, len(queries))
        if padded_bytes <= _MOST_PADDED_BYTES:
            return cls(queries=queries, batch_size=batch_size, num_pairs=None)
        first = torch.randperm(len(queries), generator=torch.Generator().manual_seed(seed))
        counts = _num_answers(queries, batch_rows(first, batch_size))
        return cls(queries=queries, batch_size=batch_size, num_pairs=int(counts.max()))

    def batch(self, rows: Tensor) -> QueryBatch:
        """Make the batch of the given rows."""
        queries = self.queries
        if self.num_pairs is None:
            positives: Tensor | PositivePairs = queries.padded_answers(rows)
        else:
            positives = self._filled(*queries.listed_answers(rows))
        return QueryBatch(*queries.pairs(rows), positives)

    def largest(self, num_rows: int) -> QueryBatch:
        """Make a batch that takes as much memory as any of so many rows can."""
        queries = self.queries
        rows = torch.arange(num_rows) % len(queries)
        if self.num_pairs is None:
            lists = torch.full((num_rows, queries.most_answers), -1)
            lists[:, 0] = 0
            positives: Tensor | PositivePairs = lists
        else:
            positives = self._filled(torch.arange(num_rows), torch.zeros_like(rows))
        return QueryBatch(*queries.pairs(rows), positives)

    def cut(self, order: Tensor) -> list[Tensor]:
        """Cut an order of rows into batches, none of a single row.

        Where batches have pairs, rows with the most answers change places with rows of other
        batches until no batch has more pairs than the largest of the first epoch.
        """
        batches = batch_rows(order, self.batch_size)
        if self.num_pairs is None:
            return batches
        counts = _num_answers(self.queries, batches)
        for number in (counts > self.num_pairs).nonzero()[:, 0].tolist():
            self._relieve(number, batches, counts)
        return batches

    def _filled(self, rows: Tensor, answers: Tensor) -> PositivePairs:
        """Fill pairs up to the number that all batches have."""
        num_missing = max((self.num_pairs or 0) - len(rows), 0)
        return PositivePairs(
            torch.cat([rows, rows.new_zeros(num_missing)]),
            torch.cat([answers, answers.new_full((num_missing,), -1)]),
        )

    def _relieve(self, number: int, batches: list[Tensor], counts: Tensor) -> None:
        """Swap long rows of a batch with the shortest rows of batches that have room.

        What cannot be swapped stays, and takes more memory than other batches.
        """
        assert self.num_pairs is not None, "padded lists are never too long"
        for _ in range(_MOST_SWAPS):
            if counts[number] <= self.num_pairs:
                return
            other = int(counts.argmin())
            own = self.queries.num_answers(batches[number])
            others = self.queries.num_answers(batches[other])
            gains = torch.where(
                counts[other] + own - others.min() <= self.num_pairs, own - others.min(), 0
            )
            here, there = int(gains.argmax()), int(others.argmin())
            if gains[here] <= 0:
                return
            row, other_row = batches[number][here].clone(), batches[other][there].clone()
            # Batches are views of the order, so that each is copied before it changes.
            batches[number], batches[other] = batches[number].clone(), batches[other].clone()
            batches[number][here], batches[other][there] = other_row, row
            counts[number] -= gains[here]
            counts[other] += gains[here]


def _num_answers(queries: Queries, batches: list[Tensor]) -> Tensor:
    """Return how many answers each batch has."""
    return torch.stack([queries.num_answers(rows).sum() for rows in batches])


def batch_rows(order: Tensor, batch_size: int) -> list[Tensor]:
    """Cut an order of rows into batches; none is left out and none has a single row.

    Batch normalisation cannot train on one row, so a lone last row gets one from the batch before;
    ``batch_size`` is at least 3, so that the batch before can spare it.
    """
    batches = list(order.split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [order[-batch_size - 1 : -2], order[-2:]]
    return batches
