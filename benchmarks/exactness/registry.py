"""Lists all cases."""

from __future__ import annotations

from exactness.case import Case
from exactness.cases import (
    banks,
    contrastive,
    gradients,
    indexing,
    kept_state,
    models,
    public_generative,
    public_images,
    public_language,
    public_metric,
    public_signals,
    public_transformers,
    public_vision,
    randomness,
    ranking,
    reductions,
    sequences,
    statistics,
    tokens,
)

_THEMES = (
    banks,
    contrastive,
    gradients,
    indexing,
    kept_state,
    models,
    public_generative,
    public_images,
    public_language,
    public_metric,
    public_signals,
    public_transformers,
    public_vision,
    randomness,
    ranking,
    reductions,
    sequences,
    statistics,
    tokens,
)


def all_cases() -> tuple[Case, ...]:
    """Give all cases, the blind half first."""
    found = [case for module in _THEMES for case in module.theme.cases]
    return tuple(sorted(found, key=lambda case: case.half))


def find_case(name: str) -> Case:
    """Give the case of a name.

    Raises:
        KeyError: if there is none.
    """
    return {case.name: case for case in all_cases()}[name]
