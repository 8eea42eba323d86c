"""Two tasks from two loaders at once: a `CombinedLoader` over a dict, and a weighted loss.

Classification and depth regression share an encoder; their weights are learned uncertainties
(Kendall et al., 2018). The loaders have different lengths and batch sizes.
"""

import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset


class SharedEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.layers(x)


class MultiTaskModel(L.LightningModule):
    def __init__(self, num_classes=6, width=12, lr=2e-3, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = SharedEncoder(width)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, num_classes),
        )
        self.depth_head = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
            nn.Conv2d(2 * width, 1, 3, padding=1),
        )
        self.log_vars = nn.ParameterDict(
            {"cls": nn.Parameter(torch.zeros(())), "depth": nn.Parameter(torch.zeros(()))}
        )

    def forward(self, x, task):
        head = self.classifier if task == "cls" else self.depth_head
        return head(self.encoder(x))

    def losses(self, batch):
        x, y = batch["cls"]
        cls_loss = F.cross_entropy(self(x, "cls"), y)
        x, depth = batch["depth"]
        valid = depth > 0
        depth_loss = F.l1_loss(self(x, "depth")[valid], depth[valid])
        return {"cls": cls_loss, "depth": depth_loss}

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        total = sum(
            torch.exp(-self.log_vars[name]) * loss + self.log_vars[name]
            for name, loss in losses.items()
        )
        size = batch["cls"][0].size(0) + batch["depth"][0].size(0)
        self.log_dict({f"train/{k}": v for k, v in losses.items()}, batch_size=size)
        self.log("train/total", total, prog_bar=True, batch_size=size)
        return total

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        if dataloader_idx == 0:
            loss = F.cross_entropy(self(x, "cls"), y)
        else:
            loss = F.l1_loss(self(x, "depth"), y)
        self.log("val_loss", loss, batch_size=x.size(0))

    def configure_optimizers(self):
        return torch.optim.Adam(
            [
                {"params": [*self.encoder.parameters()], "lr": self.hparams.lr},
                {
                    "params": [*self.classifier.parameters(), *self.depth_head.parameters()],
                    "lr": self.hparams.lr * 2,
                },
                {"params": [*self.log_vars.parameters()], "lr": 1e-2},
            ]
        )


class RoomsDataModule(L.LightningDataModule):
    """Sloping planes seen in colour; their depth, or which way they slope."""

    def __init__(self, batch_size, seed, dtype):
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.dtype = dtype

    def planes(self, n, g):
        y = torch.randint(6, (n,), generator=g)
        ramp = torch.linspace(0, 1, 48)
        depth = 1.5 + torch.cos(y * 1.047)[:, None, None] * ramp[:, None]
        depth = depth + torch.sin(y * 1.047)[:, None, None] * ramp[None, :]
        x = torch.stack([depth, depth**2, 1 / (0.6 + depth.abs())], dim=1)
        x = x + 0.3 * torch.randn(x.shape, generator=g)
        # a sensor does not see everything
        holes = torch.rand(depth.shape, generator=g) < 0.2
        depth = depth.masked_fill(holes, 0.0)[:, None]
        return x.to(self.dtype), y, depth.to(self.dtype)

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(self.seed)
        x, y, _ = self.planes(9 * self.batch_size, g)
        self.cls_set = TensorDataset(x, y)
        x, _, depth = self.planes(6 * (self.batch_size // 2), g)
        self.depth_set = TensorDataset(x, depth)
        x, y, depth = self.planes(2 * self.batch_size, g)
        self.val_sets = [TensorDataset(x, y), TensorDataset(x, depth)]

    def loader(self, dataset, batch_size, offset):
        g = torch.Generator().manual_seed(self.seed + offset)
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=g)

    def train_dataloader(self):
        loaders = {
            "cls": self.loader(self.cls_set, self.batch_size, 0),
            "depth": self.loader(self.depth_set, self.batch_size // 2, 1),
        }
        return CombinedLoader(loaders, mode="max_size_cycle")

    def val_dataloader(self):
        return [DataLoader(s, batch_size=self.batch_size) for s in self.val_sets]


def build(seed, dtype=torch.float32, *, batch_size=32, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = MultiTaskModel(dropout=dropout).to(dtype)
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**flags, **trainer_flags}), model, RoomsDataModule(batch_size, seed, dtype)
