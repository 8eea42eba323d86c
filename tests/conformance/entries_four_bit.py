"""The entry of the strategy that trains adapters on packed weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.zoo.four_bit import library
from torch import nn

from memfit import Job
from memfit.strategies.four_bit_base import FourBitBase

from .builders import Entry, residual
from .entries_optimizer import clipped_adamw, large_parameters, trained_in_two_groups

SETTING = FourBitBase(rank=2, double_quantisation=False)


def representable() -> Job:
    """Return weights that are unpacked as they were packed, so that undoing gives them back."""
    job = residual()

    def build() -> nn.Module:
        model = job.model()
        functional = library().functional
        for layer in model.modules():
            if type(layer) is nn.Linear:
                packed, state = functional.quantize_4bit(layer.weight.data, quant_type="nf4")
                with torch.no_grad():
                    layer.weight.copy_(functional.dequantize_4bit(packed, state))
        return model

    return replace(job, model=build)


def only_convolutions() -> Job:
    return replace(
        residual(),
        model=lambda: nn.Conv1d(4, 4, 1),
        batch=lambda size: torch.randn(size, 4, 6),
        loss=lambda model, batch: model(batch).square().mean(),
    )


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=FourBitBase,
        settings=(SETTING,),
        jobs=(representable, trained_in_two_groups, clipped_adamw),
        large_job=large_parameters,
        large_settings=(FourBitBase(rank=4), SETTING, FourBitBase(compute_dtype="float32")),
        peak_tolerance=1e-3,
        refusal=(FourBitBase(), only_convolutions, "no torch.nn.Linear whose weight"),
    ),
)
