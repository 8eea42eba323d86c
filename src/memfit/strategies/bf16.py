"""bf16: forward and loss run under autocast in bfloat16; parameters stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts, own_autocast_obstacle
from memfit.trace.events import Category


@dataclass(frozen=True, kw_only=True)
class Bf16(Strategy):
    """Run forward and loss under ``torch.autocast`` with bfloat16.

    Activations take half the memory; each weight that is used gets a bfloat16 copy until the
    context ends. bfloat16 has float32's range, so no gradient scaler is needed.

    Limits: approximate; relative rounding error 2^-8 per operation. It saves nothing on parameters,
    gradients and optimizer states. A loss that runs under an autocast of its own is left to it.
    Source: https://docs.pytorch.org/docs/stable/amp.html (operator lists per device type).
    """

    name: ClassVar[str] = "bf16"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.FORWARD})
    goes_with_shards: ClassVar[bool] = True
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.SAVED_ACTIVATIONS: 0.5,
        Category.TEMPORARIES: 0.5,
    }

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse a loss that has an autocast of its own, inside of which this one has no say."""
        return own_autocast_obstacle(facts)

    def apply(self, session: Session) -> Undo:
        """Add the autocast context."""
        return session.wrap_forward(
            partial(torch.autocast, session.device_type, dtype=torch.bfloat16)
        )
