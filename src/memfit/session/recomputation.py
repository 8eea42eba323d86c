"""Tells whether torch will run what is happening now once more in backward."""

from __future__ import annotations

import torch

_CHECKPOINTING = "torch.utils.checkpoint"


def is_recomputed_later() -> bool:
    """Return whether all this lies inside a checkpointed region, which saves nothing here."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == _CHECKPOINTING
