"""What the loss of one triple is, chosen by name, and triples as samples of an influence scan.

Shape suffixes: B triples, N entities, D embedding dimension, T answers per query.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memfit.influence import Samples, one_to_many_losses
from memfit.losses import PositivePairs
from memfit_workloads.conve.model import ConvE
from memfit_workloads.conve.queries import Queries, with_inverses
from memfit_workloads.conve.settings import K_VS_ALL

from .arguments import BOTH, ROW, TRAINING

_FEWEST_AT_A_TIME, _MOST_CHUNKS = 1024, 32
"""Entities scored at a time: in large graphs more, as each chunk has operators of its own."""
_MOST_PADDED = 1024
"""Answers of the longest query above which pairs are made."""


class TripleBatch(NamedTuple):
    """Triples, each with the queries that it answers: (head, relation), and the inverse's."""

    heads: Tensor
    """(B, S) int64, S the number of sides."""
    relations: Tensor
    """(B, S) int64, inverse relations included."""
    tails: Tensor
    """(B, S) int64."""
    positives: tuple[Tensor | PositivePairs, ...]
    """For each side what counts as true of its queries: (B, T) int64, padded with -1, or pairs.
    Empty where the loss of a triple does not ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TripleLoss:
    """The loss of one triple, `(model, batch) -> (B,)`.

    * training, row: what training takes of (head, relation) against all tails, the mean of N
      binary cross-entropies to smoothed labels. Triples that share it share a gradient.
    * training, target: the one of these N terms that is the triple's own.
    * target: the binary cross-entropy of the tail's score to 1, without smoothing.
    """

    loss: str
    triple_loss: str
    label_smoothing: float
    use_mixed_precision: bool = False

    def __call__(self, model: nn.Module, batch: TripleBatch) -> Tensor:
        """Return the losses, both sides of a triple added up."""
        assert isinstance(model, ConvE), "triples are scored by a ConvE"
        num_sides = batch.heads.shape[1]
        device = model.entity_bias.device
        batch = tree_map(lambda part: part.to(device), batch)
        losses = self._of_side(model, batch, 0)
        for side in range(1, num_sides):
            losses = losses + self._of_side(model, batch, side)
        return losses

    def _of_side(self, model: ConvE, batch: TripleBatch, side: int) -> Tensor:
        heads, relations, tails = (
            part[:, side] for part in (batch.heads, batch.relations, batch.tails)
        )
        query_BD = self._encoded(model, heads, relations)
        table, bias = model.entity_embedding.weight, model.entity_bias
        if self.triple_loss == ROW:
            return one_to_many_losses(
                query_BD,
                table,
                bias,
                batch.positives[side],
                label_smoothing=self.label_smoothing,
                chunk=max(_FEWEST_AT_A_TIME, -(-len(table) // _MOST_CHUNKS)),
            )
        score_B = (query_BD * model.entity_embedding(tails)).sum(dim=1) + bias[tails]
        if self.loss != TRAINING:
            return nn.functional.softplus(-score_B)
        num_entities = len(table)
        label = 1.0 - self.label_smoothing + self.label_smoothing / num_entities
        return (nn.functional.softplus(score_B) - label * score_B) / num_entities

    def _encoded(self, model: ConvE, heads: Tensor, relations: Tensor) -> Tensor:
        """Encode queries; losses are always computed in the type of the weights."""
        weight = model.entity_bias
        kind = weight.device.type
        low = torch.autocast(kind, torch.bfloat16) if self.use_mixed_precision else nullcontext()
        with low:
            query_BD = model.encode(heads, relations)
        return query_BD.to(weight.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Triples:
    """Triples with what training counts as true of their queries."""

    triples: Tensor
    known: Queries
    """The queries of the training, with all their tails."""
    sides: str
    training_target: str
    triple_loss: str = ROW

    def samples(self) -> Samples:
        """Return them for a scan."""
        return Samples(count=len(self.triples), batch=self.batch)

    def batch(self, rows: Tensor) -> TripleBatch:
        """Make the batch of some triples, rows (B,)."""
        sides = self._sides_of(self.triples[rows])
        heads, relations, tails = torch.stack(sides, dim=1).unbind(dim=2)
        positives: tuple[Tensor | PositivePairs, ...] = ()
        if self.triple_loss == ROW:
            listings = self._listings
            positives = tuple(
                each.of_triples(side) for each, side in zip(listings, sides, strict=True)
            )
        return TripleBatch(heads=heads, relations=relations, tails=tails, positives=positives)

    def _sides_of(self, triples: Tensor) -> list[Tensor]:
        """Return the triples (n, 3), and their inverses where both sides are asked about."""
        if self.sides != BOTH:
            return [triples]
        return list(with_inverses(triples, self.known.num_relations // 2).chunk(2))

    @cached_property
    def _listings(self) -> list[_Listing]:
        """Return how the answers of each side are listed."""
        known = self.known if self.training_target == K_VS_ALL else None
        return [_Listing.of(side, known) for side in self._sides_of(self.triples)]


def description_of(loss: str, triple_loss: str, sides: str) -> str:
    """Say in words what the loss of a triple was."""
    what = {
        (True, True): "the training loss of (head, relation) against all tails",
        (True, False): "the triple's own part of the training loss",
    }.get((loss == TRAINING, triple_loss == ROW), "the cross-entropy of the tail's score alone")
    return f"{what}, {'both directions' if sides == BOTH else 'head to tail'}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Listing:
    """The answers to the queries of triples: what training knew, and each triple's own tail.

    Shape suffixes: B triples, T answers per query.
    """

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
