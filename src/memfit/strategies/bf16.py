"""bf16: forward and loss run under autocast in bfloat16; parameters stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from memfit.session.session import Session
from memfit.strategies.autocast import AbstractAutocast, Containers, containers_of
from memfit.strategies.base import Numerics, Undo
from memfit.trace.events import Category


@dataclass(frozen=True, kw_only=True)
class Bf16(AbstractAutocast):
    """Run forward and loss under ``torch.autocast`` with bfloat16.

    Activations take half the memory; each weight that is used gets a bfloat16 copy until the
    context ends. bfloat16 has float32's range, so no gradient scaler is needed. ``keep`` names
    modules that compute as they would without it, in forward, backward and recomputation; a range
    of numbered siblings is written ``layers.0-3``.

    Limits: approximate; relative rounding error 2^-8 per operation. It saves nothing on parameters,
    gradients and optimizer states. A loss that runs under an autocast of its own is left to it.
    A kept module has to be called: one whose weights another module reads is refused in the first
    step. What a kept module gives is float32, and so is what the rest makes of it but for products.
    Source: https://docs.pytorch.org/docs/stable/amp.html (operator lists per device type).
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    goes_with_shards: ClassVar[bool] = True
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.SAVED_ACTIVATIONS: 0.5,
        Category.TEMPORARIES: 0.5,
    }

    @classmethod
    def own_facts(cls, session: Session) -> Containers:
        """Look for modules that cannot be kept."""
        return containers_of(session)

    def apply(self, session: Session) -> Undo:
        """Add the autocast context, and keep modules out of it."""
        return self.autocast(session)
