"""What the conformance suite knows of each strategy: settings to try, jobs, and what it refuses.

A new strategy joins the suite with one entry in a file ``entries_*.py``; see all_entries.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit import Job, Total
from memfit.losses import one_to_many_bce
from memfit.strategies import Strategy
from memfit.strategies.base import Numerics

JobBuilder = Callable[[], Job]

# By numerics class: the type in which a planned step is held against the plain one, and how far
# apart they may be. Autocast leaves fp64 alone, so what is approximate is compared in fp32.
TOLERANCES: Mapping[Numerics, tuple[torch.dtype, float]] = {
    Numerics.EXACT: (torch.float64, 1e-10),
    Numerics.APPROXIMATE: (torch.float32, 5e-2),
    Numerics.DIFFERENT: (torch.float32, math.inf),  # the strategy's own tests hold its results
}
# Scratch depends on the processor and the number of threads. With one thread of AVX-512 that of all
# kernels but convolutions is known, and some scalars are all that may be missing. Under AVX2 that of
# LSTMs is not.
CONVOLUTION_TOLERANCE = 0.01
IS_KNOWN = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.get_num_threads() == 1
PEAK_TOLERANCE = 1e-5 if IS_KNOWN else CONVOLUTION_TOLERANCE
SCALARS_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the suite tries of one strategy."""

    strategy: type[Strategy]
    settings: tuple[Strategy, ...]
    """Instances to try, each on each of the jobs."""
    jobs: tuple[JobBuilder, ...]
    """Small jobs that it applies to, without dropout."""
    large_job: JobBuilder
    """A job of megabytes that it applies to, where predicted bytes are held against measured."""
    large_settings: tuple[Strategy, ...]
    """Instances to try on the large job."""
    peak_tolerance: float = PEAK_TOLERANCE
    """How far a predicted peak may be from the measured one, relative to it."""
    refusal: tuple[Strategy, JobBuilder, str] | None
    """A setting, a job that it must refuse and a part of the sentence; None if it takes all."""
    device: str = "cpu"
    """Where it applies; on a GPU its steps are recorded, and nothing is run."""
    is_offered: bool = True
    """Whether the planner tries it by itself."""


def near_peak(peak_bytes: int, tolerance: float = PEAK_TOLERANCE) -> object:
    """Return what equals another peak of the same step but for scalars."""
    return pytest.approx(peak_bytes, rel=tolerance, abs=SCALARS_BYTES)


class Residual(nn.Module):
    """A residual block."""

    def __init__(self, width: int, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Convolutional(nn.Module):
    """A convolution with batch normalisation, which normalises twice a block."""

    def __init__(self, channels: int, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(rate)
        self.second = nn.Conv2d(channels, channels, 1)
        self.last_norm = nn.BatchNorm2d(channels, momentum=None)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        return x + self.last_norm(self.second(hidden))


class TiedLanguageModel(nn.Module):
    """Embedding and output share their weight."""

    def __init__(self, width: int = 8, vocabulary: int = 11, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class ManyCandidates(nn.Module):
    """Score rows against every entry of a table."""

    def __init__(self, width: int, num_candidates: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.table = nn.Embedding(num_candidates, width)
        self.bias = nn.Parameter(torch.zeros(num_candidates))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squared_error(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def residual(
    width: int = 8, num_blocks: int = 4, batch_size: int = 10, rate: float = 0.0, clip=None
) -> Job:
    """Return a stack of residual blocks and a mean loss."""
    return Job(
        model=lambda: nn.Sequential(*(Residual(width, rate) for _ in range(num_blocks))),
        batch=lambda size: (torch.randn(size, width), torch.randn(size, width)),
        loss=squared_error,
        optimizer=sgd,
        batch_size=batch_size,
        clip_grad_norm=clip,
    )


def residual_with_dropout() -> Job:
    return residual(rate=0.3)


def residual_with_clipping() -> Job:
    return residual(clip=0.01)


def large_residual() -> Job:
    return residual(width=64, batch_size=384)


def ragged_tokens() -> Job:
    """Return sequences of different lengths, a tied weight, and a loss over true tokens."""

    def batch(size):
        ids = torch.randint(0, 11, (size, 9))
        lengths = torch.randint(2, 10, (size, 1))
        targets = torch.where(torch.arange(9) < lengths, ids, -100)
        return {"ids": ids, "targets": targets}

    def loss(model, batch):
        logits, targets = model(batch["ids"]), batch["targets"]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Total(total, (targets != -100).sum())

    return Job(model=TiedLanguageModel, batch=batch, loss=loss, optimizer=sgd, batch_size=7)


def samples_in_second_dimension() -> Job:
    """Return batches of (steps, samples, features) with a mask that has no samples."""

    def batch(size):
        return {"x": torch.randn(5, size, 8), "mask": torch.ones(5, 1, 1), "y": torch.randn(size)}

    def loss(model, batch):
        pooled = (model(batch["x"]) * batch["mask"]).mean(dim=(0, 2))
        return (pooled - batch["y"]).square().mean()

    return Job(
        model=lambda: nn.Sequential(*(Residual(8) for _ in range(2))),
        batch=batch,
        loss=loss,
        optimizer=sgd,
        batch_size=10,
    )


def batch_normalised(
    channels: int = 4, side: int = 5, batch_size: int = 10, rate: float = 0.0
) -> Job:
    """Return convolutional blocks with batch normalisation."""

    def model():
        blocks = [Convolutional(channels, rate) for _ in range(2)]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return Job(
        model=model,
        batch=lambda size: (torch.randn(size, channels, side, side), torch.randn(size, channels)),
        loss=squared_error,
        optimizer=sgd,
        batch_size=batch_size,
    )


def large_batch_normalised() -> Job:
    return batch_normalised(channels=16, side=32, batch_size=32)


def many_candidates(width: int = 8, num_candidates: int = 600, batch_size: int = 6) -> Job:
    """Return a streamable loss of rows x candidates."""

    def batch(size):
        return torch.randn(size, width), torch.randint(0, num_candidates, (size, 3))

    def loss(model, batch):
        rows, positives = batch
        return one_to_many_bce(
            model.query(rows), model.table.weight, model.bias, positives, label_smoothing=0.1
        )

    return Job(
        model=lambda: ManyCandidates(width, num_candidates),
        batch=batch,
        loss=loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def large_many_candidates() -> Job:
    return many_candidates(width=64, num_candidates=4096, batch_size=64)


def unknown_optimizer() -> Job:
    """Return an optimizer from outside torch.optim."""

    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)

    job = residual()
    return Job(
        model=job.model, batch=job.batch, loss=job.loss, optimizer=Plain, batch_size=job.batch_size
    )


def one_layer() -> Job:
    return Job(
        model=lambda: nn.Linear(8, 8),
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss=squared_error,
        optimizer=sgd,
        batch_size=4,
    )
