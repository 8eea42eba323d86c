"""How well distances between codes are those of the tree. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import spearmanr

LEAST_TREE_DISTANCE = 0.1
RANKS = (5, 10, 20)
_LEAST_CV, _LEAST_VARIANCE = 0.05, 1e-3
_TINY = 1e-6


def tree_metrics(distances: np.ndarray, tree: np.ndarray) -> dict[str, float]:
    """Compare distances of all pairs, (N, N), with those of the tree.

    ``cophenetic`` is Pearson's correlation, ``spearman`` that of ranks, ties sharing theirs.
    ``ndcg_K`` ranks all other codes for each code; what is at distance d in the tree is worth
    ``1 - d / (largest d)``. ``distortion`` is one distance by the other.
    """
    upper = np.triu_indices(len(tree), 1)
    here, there = distances[upper], tree[upper]
    counted = there >= LEAST_TREE_DISTANCE
    here, there = here[counted], there[counted]
    ratios = here / there
    found = {
        "cophenetic": float(np.corrcoef(here, there)[0, 1]),
        "spearman": float(spearmanr(here, there).statistic),
        "distortion_mean": float(ratios.mean()),
        "distortion_std": float(ratios.std()),
        "distortion_median": float(np.median(ratios)),
    }
    return found | {f"ndcg_{rank}": ndcg(distances, tree, rank) for rank in RANKS}


def ndcg(distances: np.ndarray, tree: np.ndarray, rank: int) -> float:
    """Return the normalised discounted cumulative gain of the nearest codes, over all codes."""
    others = ~np.eye(len(tree), dtype=bool)
    discount = 1 / np.log2(np.arange(2, rank + 2))
    scores = []
    for row, is_other in enumerate(others):
        steps = tree[row][is_other]
        worth = (steps.max() - steps + _TINY) / (steps.max() + _TINY)
        order = np.argsort(distances[row][is_other], kind="stable")[:rank]
        best = np.sort(worth)[::-1][:rank]
        scores.append(
            (worth[order] * discount[: len(order)]).sum() / (best * discount[: len(best)]).sum()
        )
    return float(np.mean(scores))


def retrieval_metrics(
    distances: np.ndarray, paths: np.ndarray, levels: np.ndarray
) -> dict[str, float | None]:
    """Find parents and children among the codes of the next level.

    ``parent_1``: how often the nearest code one level up is the parent. ``child_5``: how many of
    the nearest codes one level down, five or as many as there are children, are children.
    """
    parents, children = [], []
    for code, level in enumerate(levels):
        above = np.flatnonzero(levels == level - 1)
        parent = (
            above[paths[above, level - 3] == paths[code, level - 3]] if level > 2 else above[:0]
        )
        if len(parent):
            parents.append(float(above[distances[code, above].argmin()] == parent[0]))
        below = np.flatnonzero(levels == level + 1)
        own = below[paths[below, level - 2] == paths[code, level - 2]]
        if len(own):
            count = min(5, len(own))
            nearest = below[np.argsort(distances[code, below], kind="stable")[:count]]
            children.append(float(np.isin(nearest, own).mean()))
    return {
        "parent_1": float(np.mean(parents)) if parents else None,
        "child_5": float(np.mean(children)) if children else None,
    }


def spread_metrics(points: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Say how far points are spread out, and whether they have collapsed onto each other."""
    space = points[:, 1:]
    lengths = np.linalg.norm(space, axis=1)
    pairs = distances[np.triu_indices(len(distances), 1)]
    variance = float(space.var(0).mean()) * space.shape[1]
    distance_cv = float(pairs.std() / max(pairs.mean(), _TINY))
    return {
        "norm_cv": float(lengths.std() / max(lengths.mean(), _TINY)),
        "distance_cv": distance_cv,
        "variance": variance,
        "is_collapsed": distance_cv < _LEAST_CV or variance < _LEAST_VARIANCE,
    }
