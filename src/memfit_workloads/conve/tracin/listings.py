"""What counts as true of the queries of triples, in the form that takes the least memory.

Shape suffixes: B triples, T answers per query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from memfit.losses import PositivePairs
from memfit_workloads.conve.queries import Queries

_MOST_PADDED = 1024
"""Answers of the longest query above which pairs are made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The answers to the queries of triples: what training knew, and each triple's own tail."""

    known: Queries | None
    """None where a triple's own tail alone counts as true."""
    ends: Tensor | None
    """(n + 1,): answers of all triples up to each, where pairs are made."""
    most: dict[int, int] = field(default_factory=dict)
    """The answers of so many triples in a row, where they are most; looked for once."""

    @classmethod
    def of(cls, triples: Tensor, known: Queries | None) -> Self:
        """Choose the form for triples (n, 3)."""
        if known is None or known.most_answers < _MOST_PADDED:
            return cls(known=known, ends=None)
        rows, is_known = known.rows_of(triples[:, 0], triples[:, 1])
        counts = known.num_answers(rows).masked_fill_(~is_known, 0).add_(1)
        return cls(known=known, ends=torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    def of_triples(self, triples: Tensor) -> Tensor | PositivePairs:
        """List what is true of the queries of triples (B, 3): padded lists (B, T), or pairs.

        Lists are as wide as the longest of all, and there are as many pairs as the longest run of
        B triples has, so that all batches take the same memory.
        """
        heads, relations, tails = triples.unbind(dim=1)
        if self.known is None:
            return tails[:, None].contiguous()
        rows, is_known = self.known.rows_of(heads, relations)
        place = is_known.nonzero()[:, 0]
        if self.ends is None:
            positives = torch.full((len(tails), self.known.most_answers + 1), -1)
            positives[:, 0] = tails
            if len(place):
                found = self.known.padded_answers(rows[place])
                positives[place, 1 : 1 + found.shape[1]] = found
            return positives
        position, answers = self.known.listed_answers(rows[place])
        num_missing = max(0, self._most_of(len(tails)) - len(tails) - len(answers))
        return PositivePairs(
            torch.cat([torch.arange(len(tails)), place[position], position.new_zeros(num_missing)]),
            torch.cat([tails, answers, answers.new_full((num_missing,), -1)]),
        )

    def _most_of(self, num_triples: int) -> int:
        """Return the answers of so many triples in a row, where they are most."""
        assert self.ends is not None, "only pairs are filled up"
        num_triples = min(num_triples, len(self.ends) - 1)
        if num_triples not in self.most:
            runs = self.ends[num_triples:] - self.ends[: len(self.ends) - num_triples]
            self.most[num_triples] = int(runs.max())
        return self.most[num_triples]
