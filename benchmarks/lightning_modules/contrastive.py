"""SimCLR after Lightning's tutorial on contrastive learning, with CLIP's learnable temperature.

Two views of each picture; every other view of the batch is a negative.
"""

import logging
import math
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def conv_block(c_in, c_out, stride, norm):
    normalization = nn.BatchNorm2d(c_out) if norm == "batch" else nn.GroupNorm(8, c_out)
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False),
        normalization,
        nn.ReLU(inplace=True),
    )


class Encoder(nn.Module):
    def __init__(self, width, norm, dropout):
        super().__init__()
        self.stem = conv_block(3, width, 2, norm)
        self.body = nn.Sequential(
            conv_block(width, width, 1, norm),
            conv_block(width, 2 * width, 2, norm),
            conv_block(2 * width, 2 * width, 1, norm),
            conv_block(2 * width, 4 * width, 2, norm),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.pool(self.body(self.stem(x))).flatten(1))


class SimCLR(L.LightningModule):
    def __init__(
        self,
        hidden_dim=64,
        width=32,
        norm="group",
        dropout=0.0,
        lr=5e-4,
        temperature=0.07,
        weight_decay=1e-4,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(width, norm, dropout)
        self.projector = nn.Sequential(
            nn.Linear(4 * width, 4 * hidden_dim),
            nn.ReLU(inplace=True),
            nn.Linear(4 * hidden_dim, hidden_dim),
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
        lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=10, eta_min=self.hparams.lr / 50
        )
        return [optimizer], [lr_scheduler]

    def info_nce_loss(self, batch, mode="train"):
        views, _ = batch
        imgs = torch.cat(views, dim=0)
        feats = F.normalize(self.projector(self.encoder(imgs)), dim=-1)

        cos_sim = feats @ feats.t() * self.logit_scale.exp().clamp(max=100.0)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim = cos_sim.masked_fill(self_mask, -torch.inf)
        n = imgs.shape[0] // 2
        positives = torch.arange(2 * n, device=cos_sim.device).roll(n)
        nll = F.cross_entropy(cos_sim, positives)

        with torch.no_grad():
            z1, z2 = feats.chunk(2)
            alignment = (z1 - z2).pow(2).sum(dim=1).mean()
            acc_top1 = (cos_sim.argmax(dim=1) == positives).float().mean()
        self.log(mode + "_loss", nll, prog_bar=True, batch_size=n)
        self.log(mode + "_alignment", alignment, batch_size=n)
        self.log(mode + "_acc_top1", acc_top1, batch_size=n)
        self.log("temperature", 1 / self.logit_scale.detach().exp(), batch_size=n)
        return nll

    def training_step(self, batch, batch_idx):
        return self.info_nce_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self.info_nce_loss(batch, mode="val")


class ContrastiveTransformations:
    """Two augmented views of a picture: flipped, shifted, recoloured."""

    def __init__(self, seed, n_views=2):
        self.seed = seed
        self.n_views = n_views

    def view(self, x, g):
        if torch.rand((), generator=g) < 0.5:
            x = x.flip(-1)
        dy, dx = torch.randint(-6, 7, (2,), generator=g).tolist()
        x = x.roll((dy, dx), dims=(-2, -1))
        gain = 1 + 0.4 * torch.randn(3, 1, 1, generator=g).to(x.dtype)
        return x * gain + 0.05 * torch.randn(x.shape, generator=g).to(x.dtype)

    def __call__(self, x, index):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return [self.view(x, g) for _ in range(self.n_views)]


class BlobPictures(Dataset):
    """Pictures of a few smooth blobs, with the class of the first blob."""

    def __init__(self, n, seed, dtype, transform):
        g = torch.Generator().manual_seed(seed)
        coarse = torch.randn(n, 3, 4, 4, generator=g)
        self.labels = coarse[:, :, 0, 0].argmax(dim=1)
        self.images = F.interpolate(coarse, size=32, mode="bilinear").to(dtype)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i], i), self.labels[i]


class ContrastiveDataModule(L.LightningDataModule):
    def __init__(self, batch_size=128, n_train=1024, n_val=128, seed=0, dtype=torch.float32):
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        transform = ContrastiveTransformations(seed)
        self.train_set = BlobPictures(n_train, seed, dtype, transform)
        self.val_set = BlobPictures(n_val, seed + 1, dtype, transform)

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


def build(seed, dtype=torch.float32, *, batch_size=128, norm="group", dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data; `norm="batch"` is SimCLR's own choice."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = SimCLR(norm=norm, dropout=dropout).to(dtype)
    datamodule = ContrastiveDataModule(batch_size=batch_size, seed=seed, dtype=dtype)
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
