"""WPO-SGM as a memfit job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from memfit.job import Job
from memfit.losses.ranks import RehearsedGroup

from .data import Samples
from .model import KernelMixture
from .settings import TrainingSettings
from .sizes import MixtureSizes


def sizes_for(settings: TrainingSettings, num_dimensions: int) -> MixtureSizes:
    """Put the sizes from the flags and from the data together."""
    return MixtureSizes(num_dimensions=num_dimensions, **asdict(settings.model))


def build_mixture(sizes: MixtureSizes, centres: Tensor, seed: int) -> KernelMixture:
    """Build a mixture whose network depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return KernelMixture(sizes, centres)


def build_job(
    settings: TrainingSettings,
    sizes: MixtureSizes,
    centres: Tensor,
    samples: Samples,
    num_ranks: int = 1,
) -> Job:
    """Describe one training step of one of the ranks to memfit.

    Where there are several, the model rehearses what they tell each other, so that a step can be
    recorded by one process; a run then gives it the real group. The loss is memfit's own mixture
    loss, so that a plan can stream it over the centres.
    """

    def model() -> KernelMixture:
        mixture = build_mixture(sizes, centres, settings.seed)
        mixture.group = RehearsedGroup(num_ranks) if num_ranks > 1 else None
        return mixture

    def batch(batch_size: int) -> Tensor:
        return samples.train[torch.arange(batch_size) % len(samples.train)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, KernelMixture), "the job's model() gives a KernelMixture"
        return model.score_matching(batch)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    return Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=settings.batch_size,
        clip_grad_norm=settings.clip_grad_norm,
        name="wpo-sgm",
    )
