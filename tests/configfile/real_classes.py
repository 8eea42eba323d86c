"""The model and data that configuration files of the Lightning CLI name."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn


class Net(LightningModule):
    """Take what the files set."""

    def __init__(self, width: int = 8, learning_rate: float = 0.1, batch_size: int = 1) -> None:
        """Keep the settings."""
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)


class Data(LightningDataModule):
    """Take what the files set."""

    def __init__(self, batch_size: int = 8, eval_batch_size: int = 8, num_workers: int = 0) -> None:
        """Keep the settings."""
        super().__init__()
        self.save_hyperparameters()
