"""ResNet-50 on pictures of ImageNet's size."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

from memfit import Job


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make pictures (B, 3, 224, 224) and labels (B,)."""
    return torch.randn(batch_size, 3, 224, 224), torch.randint(0, 1000, (batch_size,))


job = Job(
    model=lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
    batch=make_batch,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=256,
)
