"""Denoising autoencoder on small images with Lightning, and a linear probe on its code.

    python lit_autoencoder.py fit-ae --epochs 5
    python lit_autoencoder.py both
"""
import argparse
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class ShapesDataModule(L.LightningDataModule):
    """Grey images of filled circles, squares and crosses, kept in one npz."""

    def __init__(self, root: str = "data/shapes", batch_size: int = 64, size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.path = Path(root) / f"shapes{size}.npz"

    def prepare_data(self):
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(3)
        size = self.hparams.size
        yy, xx = np.mgrid[:size, :size]
        images, labels = [], []
        for _ in range(2400):
            label = rng.integers(3)
            cy, cx = rng.uniform(size * 0.3, size * 0.7, 2)
            r = rng.uniform(size * 0.1, size * 0.3)
            if label == 0:
                mask = (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
            elif label == 1:
                mask = (abs(yy - cy) < r) & (abs(xx - cx) < r)
            else:
                mask = (abs(yy - cy) < r / 3) | (abs(xx - cx) < r / 3)
            images.append(mask * rng.uniform(0.5, 1) + rng.normal(0, 0.05, mask.shape))
            labels.append(label)
        np.savez_compressed(self.path, x=np.stack(images).astype(np.float32), y=np.array(labels))

    def setup(self, stage=None):
        f = np.load(self.path)
        full = TensorDataset(torch.from_numpy(f["x"]).unsqueeze(1), torch.from_numpy(f["y"]))
        self.train, self.val, self.test = random_split(
            full, [1600, 400, 400], generator=torch.Generator().manual_seed(0)
        )

    def _loader(self, ds, **kw):
        return DataLoader(ds, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers, **kw)

    def train_dataloader(self):
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return self._loader(self.val)

    def test_dataloader(self):
        return self._loader(self.test)


def conv_block(cin, cout, stride):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(cout), nn.SiLU()
    )


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width: int = 64, latent_dim: int = 64, size: int = 32, lr: float = 1e-3, noise: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 1, size, size)
        self.encoder = nn.Sequential(
            conv_block(1, width, 1),
            conv_block(width, width, 2),
            conv_block(width, 2 * width, 2),
            conv_block(2 * width, 2 * width, 2),
            nn.Flatten(),
            nn.Linear(2 * width * (size // 8) ** 2, latent_dim),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent_dim, 2 * width * (size // 8) ** 2),
            nn.Unflatten(1, (2 * width, size // 8, size // 8)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        noisy = x + self.hparams.noise * torch.randn_like(x)
        loss = F.mse_loss(self(noisy), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x_hat = self(x)
        self.log("val_loss", F.mse_loss(x_hat, x), prog_bar=True)
        self.log("val_psnr", -10 * torch.log10(F.mse_loss(x_hat.clamp(0, 1), x.clamp(0, 1))))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class LitProbe(L.LightningModule):
    """A linear classifier on a frozen encoder."""

    def __init__(self, encoder, latent_dim, num_classes=3, lr=1e-2):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(latent_dim, num_classes)
        self.val_acc = MulticlassAccuracy(num_classes)
        self.test_acc = MulticlassAccuracy(num_classes)

    def forward(self, x):
        with torch.no_grad():
            z = self.encoder(x)
        return self.head(z)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("probe_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self(x), y)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=self.hparams.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?", default="both", choices=["fit-ae", "both"])
    parser.add_argument("--data", default="data/shapes")
    parser.add_argument("--out", default="out/lit")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--latent-dim", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--limit-train-batches", type=int, default=12)
    parser.add_argument("--precision", default=None)
    args = parser.parse_args()

    L.seed_everything(7, workers=True)
    dm = ShapesDataModule(args.data, batch_size=args.batch_size)
    precision = args.precision or ("16-mixed" if torch.cuda.is_available() else "32-true")

    ae = LitAutoEncoder(width=args.width, latent_dim=args.latent_dim)
    checkpoint = ModelCheckpoint(monitor="val_loss", filename="ae-{epoch:02d}-{val_loss:.3f}", save_last=True)
    trainer = L.Trainer(
        default_root_dir=args.out,
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        precision=precision,
        gradient_clip_val=1.0,
        accumulate_grad_batches=args.accumulate,
        limit_train_batches=args.limit_train_batches,
        log_every_n_steps=4,
        callbacks=[checkpoint, LearningRateMonitor(), EarlyStopping("val_loss", patience=3)],
        logger=CSVLogger(args.out, name="ae"),
    )
    trainer.fit(ae, datamodule=dm)
    print("best checkpoint:", checkpoint.best_model_path)
    if args.command == "fit-ae":
        return

    best = LitAutoEncoder.load_from_checkpoint(checkpoint.best_model_path)
    probe = LitProbe(best.encoder, args.latent_dim)
    trainer = L.Trainer(
        default_root_dir=args.out,
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        limit_train_batches=args.limit_train_batches,
        enable_checkpointing=False,
        logger=CSVLogger(args.out, name="probe"),
        log_every_n_steps=4,
    )
    trainer.fit(probe, datamodule=dm)
    trainer.test(probe, datamodule=dm)


if __name__ == "__main__":
    main()
