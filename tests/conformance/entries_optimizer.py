"""Entries of the strategies that act on the optimizer."""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit import Job
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
from memfit.strategies.optimizer_in_backward import OptimizerInBackward
from memfit.strategies.optimizer_offload import OptimizerOffload

from .builders import (
    Entry,
    batch_normalised,
    many_candidates,
    ragged_tokens,
    residual,
    residual_with_clipping,
)

EIGHT_BIT_WIDTH = 48
"""Weights of 48 x 96 values are just large enough to have 8-bit states."""
VISIBLE_RATE = 0.05
"""One step of Adam changes each value by about the rate: here by half of a typical weight."""


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=VISIBLE_RATE, betas=(0.8, 0.99), weight_decay=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=VISIBLE_RATE, eps=1e-5)


def decaying_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.3)


def two_groups(parameters):
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=VISIBLE_RATE, weight_decay=0.0)


def trained_by_adamw() -> Job:
    return replace(residual(width=EIGHT_BIT_WIDTH), optimizer=adamw)


def trained_by_adam() -> Job:
    return replace(residual(width=EIGHT_BIT_WIDTH), optimizer=adam)


def trained_by_sgd() -> Job:
    return replace(residual(width=EIGHT_BIT_WIDTH), optimizer=decaying_sgd)


def trained_in_two_groups() -> Job:
    return replace(residual(width=EIGHT_BIT_WIDTH), optimizer=two_groups)


def clipped_adamw() -> Job:
    return replace(trained_by_adamw(), clip_grad_norm=0.01)


def adam_with_coupled_decay() -> Job:
    optimizer = lambda parameters: torch.optim.Adam(parameters, weight_decay=0.01)  # noqa: E731
    return replace(residual(), optimizer=optimizer)


def large_parameters() -> Job:
    """Return a job whose parameters, gradients and states outweigh its activations."""
    return replace(residual(width=256, num_blocks=6, batch_size=16), optimizer=adamw)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=EightBitOptimizer,
        settings=(EightBitOptimizer(),),
        jobs=(
            trained_by_adamw,
            trained_by_adam,
            trained_by_sgd,
            trained_in_two_groups,
            clipped_adamw,
        ),
        large_job=large_parameters,
        large_settings=(EightBitOptimizer(),),
        refusal=(EightBitOptimizer(), adam_with_coupled_decay, "take torch.optim.AdamW"),
    ),
    Entry(
        strategy=OptimizerOffload,
        settings=(
            OptimizerOffload(to="disk", min_tensor_bytes=1),
            OptimizerOffload(to="disk", min_tensor_bytes=5000),
        ),
        jobs=(
            trained_by_adamw,
            trained_by_sgd,
            trained_in_two_groups,
            clipped_adamw,
            ragged_tokens,
            many_candidates,
            batch_normalised,
        ),
        large_job=large_parameters,
        large_settings=(
            OptimizerOffload(to="disk"),
            OptimizerOffload(to="disk", min_tensor_bytes=1),
        ),
        refusal=(OptimizerOffload(), residual, "the host's memory is the device"),
    ),
    Entry(
        strategy=OptimizerInBackward,
        settings=(OptimizerInBackward(),),
        jobs=(
            residual,
            ragged_tokens,
            many_candidates,
            batch_normalised,
            trained_by_adamw,
            trained_in_two_groups,
        ),
        large_job=large_parameters,
        large_settings=(OptimizerInBackward(),),
        refusal=(OptimizerInBackward(), residual_with_clipping, "clips the global gradient norm"),
    ),
)
