"""An MLP-Mixer whose `training_step` returns a dict, with averaged weights kept by a callback.

`on_train_batch_end` of the module and of a callback read what the step returned; validation runs
with the averaged weights, as in timm and in the EMA callbacks that people pass around.
"""

import copy
import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, num_patches, dim, token_dim, channel_dim, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(
            nn.Linear(num_patches, token_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(token_dim, num_patches),
        )
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = nn.Sequential(
            nn.Linear(dim, channel_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(channel_dim, dim),
        )

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class EMACallback(L.Callback):
    """Keeps an exponential moving average of the module's weights."""

    def __init__(self, decay=0.95):
        self.decay = decay
        self.ema_state = None
        self.collected = None

    def on_fit_start(self, trainer, pl_module):
        if self.ema_state is None:
            self.ema_state = copy.deepcopy(pl_module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for key, value in pl_module.state_dict().items():
            ema = self.ema_state[key]
            if ema.is_floating_point():
                ema.mul_(self.decay).add_(value, alpha=1 - self.decay)
            else:
                ema.copy_(value)

    def on_validation_start(self, trainer, pl_module):
        self.collected = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.ema_state)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.collected)
        self.collected = None

    def state_dict(self):
        return {"ema_state": self.ema_state}

    def load_state_dict(self, state_dict):
        self.ema_state = state_dict["ema_state"]


class LitMixer(L.LightningModule):
    def __init__(self, num_classes=10, patch=4, dim=96, depth=4, dropout=0.0, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Conv2d(3, dim, patch, stride=patch)
        num_patches = (32 // patch) ** 2
        self.blocks = nn.Sequential(
            *[MixerBlock(num_patches, dim, 64, 2 * dim, dropout) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.register_buffer("running_loss", torch.zeros(()))
        self.hard_examples = []

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        losses = F.cross_entropy(logits, y, label_smoothing=0.1, reduction="none")
        return {
            "loss": losses.mean(),
            "preds": logits.argmax(dim=-1),
            "per_sample": losses.detach(),
            "target": y,
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.running_loss.mul_(0.9).add_(outputs["loss"], alpha=0.1)
        acc = (outputs["preds"] == outputs["target"]).float().mean()
        self.hard_examples.append(int(outputs["per_sample"].argmax()))
        self.log("train_loss", outputs["loss"], prog_bar=True)
        self.log("running_loss", self.running_loss.clone())
        self.log("train_acc", acc, prog_bar=True)

    def on_train_epoch_end(self):
        self.hard_examples.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(dim=-1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)


class StripesDataModule(L.LightningDataModule):
    """Stripes whose direction is the class."""

    def __init__(self, batch_size, seed, dtype):
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.dtype = dtype

    def make(self, n, g):
        y = torch.randint(10, (n,), generator=g)
        angle = y * 0.314
        ramp = torch.arange(32.0)
        phase = torch.cos(angle)[:, None, None] * ramp[:, None]
        phase = phase + torch.sin(angle)[:, None, None] * ramp[None, :]
        x = torch.sin(phase)[:, None] * torch.rand(n, 3, 1, 1, generator=g)
        x = x + 0.3 * torch.randn(n, 3, 32, 32, generator=g)
        return TensorDataset(x.to(self.dtype), y)

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(self.seed)
        self.train_set = self.make(9 * self.batch_size, g)
        self.val_set = self.make(2 * self.batch_size, g)

    def train_dataloader(self):
        g = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, generator=g)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def build(seed, dtype=torch.float32, *, batch_size=64, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = LitMixer(dropout=dropout).to(dtype)
    callbacks = trainer_flags.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, L.Callback) else callbacks
    callbacks = [EMACallback(), *callbacks]
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(callbacks=callbacks, **{**flags, **trainer_flags})
    return trainer, model, StripesDataModule(batch_size, seed, dtype)
