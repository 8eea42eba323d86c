"""What a comparison of a plan with the plain step has shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.strategies.base import Numerics

UNPROVED = "unproved"
"""What a plan earns whose steps are equal in a trial that lacks something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far planned steps are from the plain ones: largest relative errors, as fractions.

    ``numerics`` is the class that the plan claims, ``earned`` the one that it showed.
    """

    numerics: str
    loss_error: float
    gradient_error: float
    parameter_error: float
    """Of the parameters after two steps, so that optimizer states have a say."""
    buffer_error: float
    worst_gradient: str
    earned: str
    worst: str
    """What is furthest off, such as ``gradient of head.weight``."""
    dtype: str
    """The floating-point type of the comparison."""
    bound: float
    """Up to this error, equal up to rounding."""
    batch_size: int
    strategies: tuple[str, ...] = ()
    deterministic_error: float | None = None
    """The largest error with deterministic random draws; None where that was not needed."""
    slope_error: float | None = None
    """How far the planned gradient is from the slope of the planned loss at the same draws."""
    effect_error: float = 0.0
    """Of everything else that tensors and numbers can show: optimizer states, attributes, what the
    loss holds on to."""
    effects: tuple[str, ...] = ()
    """What else the plan leaves otherwise, a sentence each, such as a count of calls."""
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    """Of each parameter's gradient; where random draws decide, with deterministic ones. Pages show
    them, JSON does not."""
    parameter_errors: Mapping[str, float] = field(default_factory=dict)
    """Of each parameter after two steps, likewise."""
    is_proof: bool = True
    """Whether everything that a step does took part, in a precision that tells rounding from error;
    the notes say what did not."""
    notes: tuple[str, ...] = ()
    """What was done otherwise than asked, and what it means."""

    @property
    def largest_error(self) -> float:
        """Return the largest of the errors."""
        results = (self.loss_error, self.gradient_error, self.parameter_error)
        return max(*results, self.buffer_error, self.effect_error)

    @property
    def keeps_promise(self) -> bool:
        """Return whether the plan is at least as good as it claims, as far as was seen."""
        if self.earned == UNPROVED:
            return True
        return Numerics(self.earned).rank <= Numerics(self.numerics).rank

    @property
    def deciding_error(self) -> float:
        """Return the error that decided the class: with deterministic draws, where they were."""
        return self.largest_error if self.deterministic_error is None else self.deterministic_error

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values, without each parameter; an error that is no number is None."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
            if name not in ("gradient_errors", "parameter_errors")
        }
        largest = self.largest_error if math.isfinite(self.largest_error) else None
        return {**values, "largest_error": largest, "keeps_promise": self.keeps_promise}
