"""Residual network on small pictures, after Lightning's CIFAR-10 tutorial.

SGD with momentum and OneCycle (or cosine) per step, torchmetrics accuracy, a validation loop.
"""

import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


def create_model(num_classes, width, blocks, dropout):
    layers = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    planes = width
    for stage in range(3):
        out_planes = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(planes, out_planes, stride))
            planes = out_planes
    layers += [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(planes, num_classes),
    ]
    return nn.Sequential(*layers)


class LitResNet(L.LightningModule):
    def __init__(
        self,
        num_classes=10,
        width=16,
        blocks=2,
        lr=0.1,
        weight_decay=5e-4,
        schedule="onecycle",
        dropout=0.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.model = create_model(num_classes, width, blocks, dropout)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.val_acc(logits, y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.hparams.lr,
            momentum=0.9,
            weight_decay=self.hparams.weight_decay,
        )
        total_steps = int(self.trainer.estimated_stepping_batches)
        if self.hparams.schedule == "onecycle":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=self.hparams.lr, total_steps=total_steps
            )
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def make_pictures(n, num_classes, seed, dtype):
    """Pictures of class-coloured gratings under noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (n,), generator=g)
    ramp = torch.linspace(0, 6.28, 32)
    grid = ramp[None, :] * torch.cos(y[:, None] * 0.7) + ramp[None, :] * 0.1
    rows = torch.sin(grid * 3)[:, None, :, None]
    columns = torch.cos(grid * 2)[:, None, None, :]
    colour = torch.rand(num_classes, 3, generator=g)[y][:, :, None, None]
    x = colour * (rows + columns) + 0.5 * torch.randn(n, 3, 32, 32, generator=g)
    return x.to(dtype), y


class PicturesDataModule(L.LightningDataModule):
    def __init__(self, batch_size=64, n_train=832, n_val=160, seed=0, dtype=torch.float32):
        super().__init__()
        self.batch_size = batch_size
        self.n_train = n_train
        self.n_val = n_val
        self.seed = seed
        self.dtype = dtype

    def setup(self, stage=None):
        x, y = make_pictures(self.n_train + self.n_val, 10, self.seed, self.dtype)
        self.train_set = TensorDataset(x[: self.n_train], y[: self.n_train])
        self.val_set = TensorDataset(x[self.n_train :], y[self.n_train :])

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def build(
    seed, dtype=torch.float32, *, batch_size=64, schedule="onecycle", dropout=0.0, **trainer_flags
):
    """Make the trainer, the module and its data; `precision="bf16-mixed"` is a trainer flag."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = LitResNet(schedule=schedule, dropout=dropout).to(dtype)
    datamodule = PicturesDataModule(batch_size=batch_size, seed=seed, dtype=dtype)
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**flags, **trainer_flags}), model, datamodule
