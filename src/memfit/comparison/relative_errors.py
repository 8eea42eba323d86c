"""How far tensors are from those that are expected, as relative errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from memfit.comparison.precision import SMALLEST_SHARE

Tensors = Mapping[str, torch.Tensor]
SMALLEST = 1e-300
"""What is divided by at least."""
_MANY_ELEMENTS, _NUM_PARTS = 1024, 256


def relative_errors(
    found: Tensors, expected: Tensors, smallest_share: float = SMALLEST_SHARE
) -> dict[str, float]:
    """Return |found - expected| / |expected| of every tensor, in the Euclidean norm.

    A tensor that is zero but for rounding (the bias in front of a batch normalisation has no
    gradient) is held against a share of the norm of all of them.
    """
    norms = norms_of(expected)
    whole = math.hypot(*(norm for norm in norms.values() if math.isfinite(norm)))
    floor = max(SMALLEST, smallest_share * whole)
    return {
        name: as_error(gap, max(norms.get(name, 0.0), floor))
        for name, gap in gaps(found, expected).items()
    }


def gaps(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the norm of each difference; what is missing on one side counts as zeros."""
    names: Sequence[str] = list(dict.fromkeys((*expected, *found)))
    return {name: _gap(found.get(name), expected.get(name)) for name in names}


def _gap(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        present = expected if found is None else found
        return 0.0 if present is None else _norm(present)
    if found.shape != expected.shape:
        return math.inf
    pairs = zip(_parts(found), _parts(expected), strict=True)
    return math.hypot(*(_gap_of_part(*map(_in_double, pair)) for pair in pairs))


def _gap_of_part(found: torch.Tensor, expected: torch.Tensor) -> float:
    # Infinities on both sides are equal; their difference would be no number.
    return float(torch.where(found == expected, 0.0, found - expected).abs().norm())


def norms_of(tensors: Tensors) -> dict[str, float]:
    """Return the Euclidean norm of each tensor, in fp64."""
    return {name: _norm(value) for name, value in tensors.items()}


def _norm(tensor: torch.Tensor) -> float:
    return math.hypot(*(float(_in_double(part).abs().norm()) for part in _parts(tensor)))


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a large tensor: in fp64 all of it may take more than there is beside training."""
    if tensor.layout is not torch.strided or tensor.numel() < _MANY_ELEMENTS:
        return (tensor,)
    longest = max(range(tensor.dim()), key=tensor.size)
    return tensor.tensor_split(min(_NUM_PARTS, tensor.size(longest)), longest)


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def as_error(gap: float, scale: float) -> float:
    """Divide; what is no number is infinitely far off."""
    error = gap / scale
    return error if math.isfinite(error) else math.inf
