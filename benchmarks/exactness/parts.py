"""Small models and batches that many cases start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job, Total

NUM_FEATURES = 12
NUM_CLASSES = 4
NUM_TOKENS = 11


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make plain SGD, which shows an error of the gradient as it is."""
    return torch.optim.SGD(parameters, lr=0.1)


def make_job(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor | Total],
    batch_size: int = 16,
) -> Job:
    """Make a job whose weights and batch are the same each time."""

    def seeded_model() -> nn.Module:
        torch.default_generator.manual_seed(0)
        return model()

    def seeded_batch(size: int) -> Any:
        torch.default_generator.manual_seed(1)
        return batch(size)

    return Job(
        model=seeded_model, batch=seeded_batch, loss=loss, optimizer=sgd, batch_size=batch_size
    )


class Modules(nn.Module):
    """Modules and parameters by name, for losses that call them one by one."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def encoder(width: int = 8) -> nn.Module:
    """Make a perceptron of two layers that gives ``width`` features."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 24), nn.Tanh(), nn.Linear(24, width))


def classifier() -> nn.Module:
    """Make a perceptron of two layers that gives one score per class."""
    return encoder(NUM_CLASSES)


def scorer() -> nn.Module:
    """Make a perceptron that gives one score."""
    return nn.Sequential(encoder(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def tagger() -> nn.Module:
    """Make a model that gives each token one score per token."""
    return nn.Sequential(nn.Embedding(NUM_TOKENS, 10), nn.Linear(10, NUM_TOKENS))


def two_blocks(make: Callable[[], nn.Module]) -> nn.Module:
    """Stack two blocks and a head."""
    return nn.Sequential(nn.Sequential(make(), make()), nn.Linear(12, 4))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compare the scores of inputs with their labels."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def vectors(size: int) -> Tensor:
    """Return feature vectors."""
    return torch.randn(size, NUM_FEATURES)


def labelled(size: int) -> tuple[Tensor, Tensor]:
    """Return feature vectors and labels that repeat, no class as often as another."""
    x = torch.randn(size, NUM_FEATURES)
    return x, torch.tensor([0, 1, 2, 0, 3, 1, 0, 2, 0, 1, 3, 0, 0, 1, 2, 3])[
        torch.arange(size) % 16
    ]


def binary(size: int) -> tuple[Tensor, Tensor]:
    """Return feature vectors and labels of zero or one, unevenly many."""
    x = torch.randn(size, NUM_FEATURES)
    return x, (torch.arange(size) % 5 < 2).to(x.dtype)


def regression(size: int) -> tuple[Tensor, Tensor]:
    """Return feature vectors and one target each."""
    x = torch.randn(size, NUM_FEATURES)
    return x, x[:, :3].sum(1).sin() + 0.1 * torch.randn(size)


def two_views(size: int) -> tuple[Tensor, Tensor]:
    """Return two views of the same samples."""
    x = torch.randn(size, NUM_FEATURES)
    return x, x + 0.3 * torch.randn(size, NUM_FEATURES)


def images(size: int, channels: int = 3, extent: int = 8) -> Tensor:
    """Return images ``(size, channels, extent, extent)``."""
    return torch.randn(size, channels, extent, extent)


def labelled_images(size: int) -> tuple[Tensor, Tensor]:
    """Return images and labels that repeat."""
    return images(size), labelled(size)[1]


def segmented(size: int) -> tuple[Tensor, Tensor]:
    """Return images and binary masks, of which some are nearly empty."""
    x = images(size)
    covered = torch.rand(size, 1, 8, 8) < torch.linspace(0.05, 0.8, size).view(-1, 1, 1, 1)
    return x, covered.to(x.dtype)


def tokens(size: int) -> Tensor:
    """Return whole sequences of seven tokens."""
    return torch.randint(1, NUM_TOKENS, (size, 7))


def padded_tokens(size: int) -> tuple[Tensor, Tensor]:
    """Return sequences padded with zeros, and their lengths, which differ."""
    ids = torch.randint(1, NUM_TOKENS, (size, 7))
    lengths = torch.tensor([7, 3, 5, 2, 6, 4, 7, 1])[torch.arange(size) % 8]
    return ids * (torch.arange(7) < lengths[:, None]), lengths
