"""Which positives and negatives an anchor has at a stage of the curriculum. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.errors import UsageError

from .tree import Tree

MOST_UNRELATED = 100
"""Negatives of other sectors that an (anchor, positive) has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the curriculum: filters, None where all are taken, and how many are drawn."""

    name: str
    anchor_level: tuple[int, ...] | None = None
    positive_level: tuple[int, ...] | None = None
    positive_relation: tuple[int, ...] | None = None
    positive_distance: tuple[float, ...] | None = None
    negative_level: tuple[int, ...] | None = None
    negative_relation: tuple[int, ...] | None = None
    negative_distance: tuple[float, ...] | None = None
    relation_margin: tuple[int, ...] | None = None
    distance_margin: tuple[float, ...] | None = None
    n_positives: int = 16
    """Of each anchor: each makes a row, so they lengthen the epoch, not the step."""
    n_negatives: int = 8
    """Of each row: they enlarge the step."""
    max_epochs: int | None = None
    learning_rate: float | None = None


class PairSampler:
    """Draw positives and negatives from the tree.

    Args:
        tree: of all codes.
        rows: numbers of the codes that are trained on; nothing else is ever drawn.
        stage: what is wanted.
    """

    def __init__(self, tree: Tree, rows: Sequence[int], stage: Stage) -> None:
        self._tree, self._stage = tree, stage
        self.rows = np.asarray(rows, dtype=np.int64)

    def pairs(self, random_seed: int) -> np.ndarray:
        """Draw the rows of an epoch, (rows, 2): anchors with one positive each.

        Raises:
            UsageError: if the stage leaves none.
        """
        rng = np.random.default_rng(random_seed)
        found: list[tuple[int, int]] = []
        for anchor in self._of_level(self.rows, self._stage.anchor_level):
            others = self.positives(int(anchor))
            count = min(self._stage.n_positives, len(others))
            found += [(int(anchor), int(each)) for each in rng.choice(others, count, replace=False)]
        if not found:
            msg = (
                f"Stage {self._stage.name} has no pair of an anchor and a positive among "
                f"{len(self.rows)} codes. Widen anchor_level, positive_level or positive_relation."
            )
            raise UsageError(msg)
        return np.array(found, dtype=np.int64)

    def positives(self, anchor: int) -> np.ndarray:
        """Return the codes that the stage lets be positives of an anchor."""
        stage, tree = self._stage, self._tree
        others = self.rows[(self.rows != anchor)]
        others = self._of_level(others, stage.positive_level)
        others = others[_among(tree.relations[anchor, others], stage.positive_relation)]
        others = others[_among(tree.distances[anchor, others], stage.positive_distance)]
        # Nothing is farther than another sector, so a positive there could have no negative.
        return others[tree.paths[others, 0] == tree.paths[anchor, 0]]

    def negative_weights(self, anchor: int, positive: int, others: np.ndarray) -> np.ndarray:
        """Return how likely each other code is to be drawn as a negative; 0 for what is none.

        A negative is farther from the anchor than the positive is. Its weight is one by the mean of
        the two margins: how much farther by distance, and by relation.
        """
        stage, tree = self._stage, self._tree
        by_distance = tree.distances[anchor, others] - tree.distances[anchor, positive]
        by_relation = tree.relations[anchor, others] - tree.relations[anchor, positive]
        allowed = (by_distance > 0) & (others != anchor) & (others != positive)
        allowed &= _among(tree.levels[others], stage.negative_level)
        allowed &= _among(tree.relations[anchor, others], stage.negative_relation)
        allowed &= _among(tree.distances[anchor, others], stage.negative_distance)
        allowed &= _among(by_relation, stage.relation_margin)
        allowed &= _among(by_distance, stage.distance_margin)
        margin = (by_distance + np.maximum(by_relation, 0)) / 2
        return np.where(allowed, 1 / np.where(allowed, margin, 1.0), 0.0)

    def negatives(
        self, anchor: int, positive: int, rng: np.random.Generator, others: np.ndarray | None = None
    ) -> np.ndarray:
        """Draw negatives without replacement: places among ``others``; fewer where there are.

        Args:
            anchor: number of the code.
            positive: of its positive.
            rng: draws.
            others: codes to draw from; None takes all that are trained on.
        """
        others = self.rows if others is None else others
        weights = self.negative_weights(anchor, positive, others)
        unrelated = np.flatnonzero((weights > 0) & (self._tree.relations[anchor, others] == 15))
        if len(unrelated) > MOST_UNRELATED:
            weights[rng.choice(unrelated, len(unrelated) - MOST_UNRELATED, replace=False)] = 0.0
        count = min(self._stage.n_negatives, int((weights > 0).sum()))
        if not count:
            return np.empty(0, dtype=np.int64)
        return rng.choice(len(others), count, replace=False, p=weights / weights.sum())

    def _of_level(self, rows: np.ndarray, levels: Sequence[int] | None) -> np.ndarray:
        return rows[_among(self._tree.levels[rows], levels)]


def _among(values: np.ndarray, wanted: Sequence[float] | None) -> np.ndarray:
    return np.ones(values.shape, dtype=bool) if wanted is None else np.isin(values, wanted)
