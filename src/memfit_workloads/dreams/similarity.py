"""How alike spectra are: by embeddings, and by the measures it is compared with.

Shapes: S spectra, P pairs.
"""

from __future__ import annotations

import numpy as np

from .spectra import Array


def cosine_matrix(embeddings: Array) -> Array:
    """Return the cosine of every two embeddings, (S, S); 0 for an embedding of zeros."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(norms == 0, 1, norms)
    return unit @ unit.T


def modified_cosine(one: Array, other: Array, tolerance_mz: float = 0.02) -> float:
    """Return the cosine of matched peaks, where a peak may be shifted by the precursors' distance.

    Matches are taken greedily from the highest product on.
    Source: Watrous et al. 2012, doi 10.1073/pnas.1203689109.

    Args:
        one: (n, 2) tokens as `spectra.prepared` makes them, the precursor first.
        other: the same of the other spectrum.
        tolerance_mz: how far matched peaks may lie apart.

    Returns:
        From 0 to 1.
    """
    shift = one[0, 0] - other[0, 0]
    distances = one[1:, None, 0] - other[None, 1:, 0]
    is_match = (np.abs(distances) <= tolerance_mz) | (np.abs(distances - shift) <= tolerance_mz)
    left, right = np.sqrt(one[1:, 1]), np.sqrt(other[1:, 1])
    products = np.where(is_match, left[:, None] * right[None], 0.0)
    total = 0.0
    while products.size and products.max() > 0:
        row, column = np.unravel_index(products.argmax(), products.shape)
        total += products[row, column]
        products[row], products[:, column] = 0.0, 0.0
    scale = np.linalg.norm(left) * np.linalg.norm(right)
    return float(total / scale) if scale else 0.0


def tanimoto(one: Array, other: Array) -> float:
    """Return the shared bits of two fingerprints by the bits of either; 0 without any."""
    either = np.logical_or(one, other).sum()
    return float(np.logical_and(one, other).sum() / either) if either else 0.0


def correlations(values_P: Array, truths_P: Array) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of two lists."""
    ranks = [_ranks(each) for each in (values_P, truths_P)]
    return {
        "pearson": float(np.corrcoef(values_P, truths_P)[0, 1]),
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
    }


def _ranks(values: Array) -> Array:
    """Return ranks; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]
