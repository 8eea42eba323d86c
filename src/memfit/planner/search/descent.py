"""The smallest peak that can be reached, for when nothing fits."""

from __future__ import annotations

from memfit.planner.search.candidates import Candidate
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recordings import Recordings
from memfit.planner.search.tree import SearchNode, SearchTree


def smallest(
    recordings: Recordings, space: SearchSpace, tree: SearchTree, neighbours: Neighbours
) -> Candidate:
    """Return the smallest candidate that was reached.

    Starts from the combination with the smallest peak to be expected, and from everything at
    once, and takes whatever strategy or halving lowers it most, until nothing does. Whole
    steps are recorded only of what seems to fit, since the others have the most micro-batches.
    """
    starts = [min(tree.nodes, key=tree.floor)]
    starts += [node for node in neighbours.strongest() if tree.open(node)]
    ends = [_descended(start, recordings, tree, neighbours) for start in starts]
    node = min(ends, key=tree.floor)
    for refinement in reversed(recordings.of(node.strategies).refinements):
        if recordings.attempt(refinement.strategies):
            break
    reached = [c for c in recordings.tried.values() if space.allows(c.strategies)]
    for candidate in sorted(reached, key=lambda each: each.peak_bytes):
        if not candidate.prediction.fits:
            return candidate
        if confirmed := recordings.attempt(candidate.strategies, in_full=True):
            return confirmed
    return recordings.in_full(())


def _descended(
    node: SearchNode, recordings: Recordings, tree: SearchTree, neighbours: Neighbours
) -> SearchNode:
    """Take whatever lowers a node's smallest peak most, until nothing does."""
    while not recordings.is_spent:
        recordings.expect([child.strategies for child in neighbours.smaller(node)])
        children = [child for child in neighbours.smaller(node) if tree.open(child)]
        best = min([node, *children], key=tree.floor)
        if best is node:
            break
        node = best
    return node
