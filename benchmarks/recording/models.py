"""The architectures to record that need nothing but torch, by name.

They are small programs of the usual kinds, made to exercise the operators that a prediction has to
follow; none is a copy of a published model. Those with repeated blocks offer
``set_grad_checkpointing()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .images import IMAGE_MODELS
from .sequences import SEQUENCE_MODELS

MODELS: dict[str, Callable[..., nn.Module]] = {**IMAGE_MODELS, **SEQUENCE_MODELS}


def build(name: str, **sizes: Any) -> nn.Module:
    """Build an architecture with random weights."""
    return MODELS[name](**sizes)
