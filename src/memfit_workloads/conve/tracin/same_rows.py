"""Triples whose losses are the same, so that one of them is compared for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from memfit import influence
from memfit_workloads.conve.queries import Queries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SameRows:
    """Groups of triples, each with one that stands for it.

    A training row is (head, relation) with all its tails, so triples that share it share its
    gradient, and all their scores.
    """

    first: Tensor
    """(g,) int64: the triple that stands for each group."""
    group_of: Tensor
    """(n,) int64: the group of each triple."""
    members: Tensor
    """(n,) int64: triples, those of a group together and in rising order."""
    ends: Tensor
    """(g + 1,) int64: where the members of each group begin and end."""

    @classmethod
    def of(cls, triples: Tensor, known: Queries | None) -> Self:
        """Group triples (n, 3) by the known query that each answers; None leaves each alone."""
        if known is None:
            numbers = torch.arange(len(triples))
            return cls(
                first=numbers,
                group_of=numbers,
                members=numbers,
                ends=torch.arange(len(triples) + 1),
            )
        rows, _ = known.rows_of(triples[:, 0], triples[:, 1])
        _, group_of, counts = torch.unique(rows, return_inverse=True, return_counts=True)
        members = group_of.argsort(stable=True)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(first=members[ends[:-1]], group_of=group_of, members=members, ends=ends)

    def of_group(self, group: int) -> list[int]:
        """Return the triples of a group."""
        members: list[int] = self.members[self.ends[group] : self.ends[group + 1]].tolist()
        return members

    def spread(
        self, ranked: influence.Ranked, place: int, number: int
    ) -> Iterator[tuple[int, float]]:
        """Yield so many triples with their scores, in the order in which groups are ranked."""
        pairs = zip(ranked.indices[place], ranked.scores[place], strict=True)
        for group, score in pairs:
            for triple in self.of_group(group)[:number]:
                yield triple, score
                number -= 1
            if not number:
                return
