"""The sizes that define a mixture, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.errors import UsageError
from memfit_workloads.model_sizes import ModelSizes

if TYPE_CHECKING:
    from .precisions import Precision

EPS, SOFTPLUS, LOW_RANK = "eps", "softplus", "low_rank"
PRECISIONS = (EPS, SOFTPLUS, LOW_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSizes(ModelSizes):
    """Everything needed to build the mixture again."""

    num_dimensions: int
    num_centres: int
    """Of the whole mixture, over all ranks."""
    depth: int = 5
    hidden_units: int = 64
    precision: str = EPS
    stability: float = 0.01
    """eps in ``L L^T + eps I``; not used by the other precisions."""
    rank: int = 8
    """Columns of a low-rank factor."""
    noise: float = 0.0
    """The variance v that is added to the mixture."""

    def __post_init__(self) -> None:
        if self.precision == EPS and self.stability <= 0:
            msg = (
                f"--stability is {self.stability}; needed is a number above 0, or "
                "--precision softplus, which does without."
            )
            raise UsageError(msg)
        if self.precision == LOW_RANK and self.noise:
            msg = (
                f"--noise is {self.noise}, which has no closed form with --precision low_rank; "
                "leave one of them out."
            )
            raise UsageError(msg)


def precision_of(sizes: MixtureSizes) -> Precision:
    """Return the way in which a mixture writes its precisions."""
    from .precisions import LowRankPrecision, SoftplusPrecision, StabilisedPrecision

    if sizes.precision == SOFTPLUS:
        return SoftplusPrecision(sizes.num_dimensions)
    if sizes.precision == LOW_RANK:
        return LowRankPrecision(sizes.num_dimensions, sizes.rank)
    return StabilisedPrecision(sizes.num_dimensions, sizes.stability)
