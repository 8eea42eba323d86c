"""Entries of the strategies that compute in fewer bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.zoo.small_jobs import regression_job
from torch import nn

from memfit import Job
from memfit.strategies.bf16 import Bf16
from memfit.strategies.fp16 import Fp16
from memfit.strategies.pure_bf16 import PureBf16

from .builders import (
    Entry,
    large_residual,
    many_candidates,
    ragged_tokens,
    residual,
    residual_with_clipping,
)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def representable() -> Job:
    """Return weights that bfloat16 can hold, so that undoing it gives back every bit of them."""
    job = residual()
    return replace(job, model=lambda: job.model().bfloat16().float())


def residual_with_adamw() -> Job:
    return replace(residual(), optimizer=adamw)


def large_residual_with_adamw() -> Job:
    return replace(residual(width=128, batch_size=384), optimizer=adamw)


def batch_normalised(clip: float | None = None) -> Job:
    """Return batch normalisation without a bias in front of it, whose gradient is rounding alone."""

    def model():
        convolution = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Tanh(), pooled, nn.Linear(4, 4))

    return regression_job(model, (4, 5, 5), (4,), optimizer=adamw, clip=clip)


def batch_normalised_and_clipped() -> Job:
    return batch_normalised(clip=0.01)


def in_half() -> Job:
    job = residual()
    return replace(job, model=lambda: job.model().half())


def in_bfloat16() -> Job:
    job = residual()
    return replace(job, model=lambda: job.model().bfloat16())


def tokens_in_one_module() -> Job:
    """Return ragged tokens whose whole model is called 0, as the first block of others is."""
    job = ragged_tokens()
    return replace(job, model=lambda: nn.Sequential(job.model()))


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=Bf16,
        settings=(Bf16(), Bf16(keep=("0",))),
        jobs=(residual, residual_with_clipping, tokens_in_one_module, batch_normalised),
        large_job=large_residual,
        large_settings=(Bf16(), Bf16(keep=("0", "2-3")), Bf16(keep=("1.up", "2.norm"))),
        refusal=(Bf16(keep=("0-1", "9.up")), residual, "no module named '9.up'"),
    ),
    Entry(
        strategy=PureBf16,
        settings=(PureBf16(),),
        jobs=(
            representable,
            residual_with_adamw,
            residual_with_clipping,
            ragged_tokens,
            batch_normalised,
            batch_normalised_and_clipped,
            many_candidates,
        ),
        large_job=large_residual_with_adamw,
        large_settings=(PureBf16(),),
        refusal=(PureBf16(), in_bfloat16, "no parameter that is trained is in float32"),
    ),
    Entry(
        strategy=Fp16,
        settings=(Fp16(), Fp16(keep=("0",))),
        jobs=(
            residual,
            residual_with_adamw,
            residual_with_clipping,
            tokens_in_one_module,
            batch_normalised_and_clipped,
        ),
        large_job=large_residual,
        large_settings=(Fp16(), Fp16(keep=("1", "3.down"))),
        refusal=(Fp16(), in_half, "Build it in float32"),
    ),
)
