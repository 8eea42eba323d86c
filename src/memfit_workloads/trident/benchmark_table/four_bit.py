"""QLoRA as the document describes it: transformers in 4 bits, all else trained as it was."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from memfit.session.session import Session
from memfit.strategies import FourBitBase
from memfit.strategies.base import Undo
from memfit_workloads.trident.attention import TransformerLayer
from memfit_workloads.trident.model import TridentNet
from memfit_workloads.trident.sizes import TridentSizes

_RANK, _SMALL_RANK = 16, 4
_NARROW = 64
"""Layers below this width would have adapters as large as themselves."""


@dataclass(frozen=True, kw_only=True)
class FourBitTransformers(FourBitBase):
    """Pack some layers, add adapters to them, and go on training what is not packed.

    ``four-bit-base`` freezes all that is not an adapter, convolutions among it. The document has
    those trained in full precision.
    """

    def apply(self, session: Session) -> Undo:
        """Pack, and give the optimizer back what is still a parameter of the model."""
        groups = session.optimizer.param_groups
        trained = [[each for each in group["params"] if each.requires_grad] for group in groups]
        with ExitStack() as undos:
            undos.callback(super().apply(session))
            present = {id(each) for each in session.model.parameters()}
            for group, before in zip(groups, trained, strict=True):
                again = [each for each in before if id(each) in present]
                group["params"] = [*again, *group["params"]]
                for parameter in again:
                    parameter.requires_grad_(True)
            return undos.pop_all().close


def four_bit_transformers(sizes: TridentSizes) -> FourBitTransformers:
    """Return the strategy that packs the linear layers of the transformers alone."""
    with torch.device("meta"):
        modules = dict(TridentNet(sizes).named_modules())
    inside = tuple(
        f"{name}." for name, module in modules.items() if isinstance(module, TransformerLayer)
    )
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    rank = _SMALL_RANK if sizes.tempo_width < _NARROW else _RANK
    return FourBitTransformers(
        rank=rank,
        alpha=2 * rank,
        kept=tuple(name for name in linear if not name.startswith(inside)),
    )
