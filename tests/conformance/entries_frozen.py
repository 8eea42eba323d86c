"""The entry of the strategy that keeps frozen weights off the device."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memfit import Job
from memfit.strategies.frozen_offload import FrozenOffload

from .builders import Entry, Residual, batch_normalised, ragged_tokens, residual

EVERYTHING = FrozenOffload(to="disk", min_tensor_bytes=1)


def frozen(job: Job) -> Job:
    """Freeze the first layers of a job's blocks, and all of the first block."""

    def build() -> nn.Module:
        model = job.model()
        blocks = [each for each in model.modules() if hasattr(each, "norm")]
        for block in blocks:
            block.norm.requires_grad_(False)
            next(block.children()).requires_grad_(False)
        blocks[0].requires_grad_(False)
        return model

    return replace(job, model=build)


def frozen_residual() -> Job:
    return frozen(residual())


def frozen_and_normalised() -> Job:
    return frozen(batch_normalised())


def frozen_tied() -> Job:
    return frozen(ragged_tokens())


def mostly_frozen(width: int = 128) -> Job:
    """Return a job of megabytes whose blocks are frozen but for their norms."""
    job = residual(width=width, num_blocks=6, batch_size=64)

    def build() -> nn.Module:
        model = nn.Sequential(*(Residual(width) for _ in range(6)))
        for block in model:
            block.up.requires_grad_(False)
            block.down.requires_grad_(False)
        return model

    return replace(job, model=build)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=FrozenOffload,
        settings=(EVERYTHING, FrozenOffload(to="disk", min_tensor_bytes=300)),
        jobs=(frozen_residual, frozen_and_normalised, frozen_tied),
        large_job=mostly_frozen,
        large_settings=(
            EVERYTHING,
            FrozenOffload(to="disk"),
            FrozenOffload(to="disk", blocks=("1-2", "4")),
        ),
        refusal=(EVERYTHING, residual, "all weights require gradients"),
    ),
)
