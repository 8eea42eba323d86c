"""Transfer learning with the `BackboneFinetuning` callback, after Lightning's finetuning example.

The backbone is frozen for the first epoch and joins the optimizer as a new group at epoch 1;
the learning rate follows the validation loss (ReduceLROnPlateau).
"""

import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy


def conv_bn(c_in, c_out, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, stride, 1, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU6(inplace=True),
    )


def mobile_backbone(width=24):
    """Stands in for a pretrained network of torchvision."""
    return nn.Sequential(
        conv_bn(3, width, stride=2),
        conv_bn(width, width, groups=width),
        nn.Conv2d(width, 2 * width, 1),
        nn.ReLU6(inplace=True),
        conv_bn(2 * width, 2 * width, stride=2, groups=2 * width),
        nn.Conv2d(2 * width, 4 * width, 1),
        nn.ReLU6(inplace=True),
        conv_bn(4 * width, 4 * width, groups=4 * width),
        nn.Conv2d(4 * width, 4 * width, 1),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )


class TransferLearningModel(L.LightningModule):
    def __init__(self, lr=1e-2, width=24, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = mobile_backbone(width)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(4 * width, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, 1),
        )
        self.train_acc = BinaryAccuracy()
        self.valid_acc = BinaryAccuracy()

    def forward(self, x):
        return self.head(self.backbone(x)).flatten()

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self(x)
        train_loss = F.binary_cross_entropy_with_logits(y_logits, y)
        self.train_acc(y_logits, y.int())
        self.log("train_loss", train_loss)
        self.log("train_acc", self.train_acc, prog_bar=True)
        return train_loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self(x)
        self.valid_acc(y_logits, y.int())
        self.log("val_loss", F.binary_cross_entropy_with_logits(y_logits, y), prog_bar=True)
        self.log("val_acc", self.valid_acc, prog_bar=True)

    def configure_optimizers(self):
        trainable_parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trainable_parameters, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class CatDogDataModule(L.LightningDataModule):
    """Two kinds of texture, standing in for cats and dogs."""

    def __init__(self, batch_size, seed, dtype):
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.dtype = dtype

    def make(self, n, g):
        y = torch.randint(2, (n,), generator=g)
        noise = torch.randn(n, 3, 64, 64, generator=g)
        smooth = F.avg_pool2d(noise, 3, stride=1, padding=1) * 3
        x = torch.where(y[:, None, None, None] == 1, smooth, noise)
        return TensorDataset(x.to(self.dtype), y.to(self.dtype))

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(self.seed)
        self.train_set = self.make(7 * self.batch_size, g)
        self.val_set = self.make(2 * self.batch_size, g)

    def train_dataloader(self):
        g = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, generator=g)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def build(seed, dtype=torch.float32, *, batch_size=64, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data; seven batches make an epoch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # batch norm stays in the optimizer while the rest is frozen, of which the callback warns
    warnings.filterwarnings("ignore", ".*provided params to be frozen already exist.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = TransferLearningModel(dropout=dropout).to(dtype)
    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.1
    )
    callbacks = trainer_flags.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, L.Callback) else callbacks
    callbacks = [finetuning, *callbacks]
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "log_every_n_steps": 5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(callbacks=callbacks, **{**flags, **trainer_flags})
    return trainer, model, CatDogDataModule(batch_size, seed, dtype)
