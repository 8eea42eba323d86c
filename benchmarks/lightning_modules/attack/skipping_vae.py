"""A convolutional VAE whose step depends on where training stands, and skips bad batches.

The weight of the KL term grows with `self.trainer.global_step`, every third batch also drops the
corners of its input by `batch_idx`, and a batch with broken pixels makes the step return None.
"""

import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(L.LightningModule):
    def __init__(self, latent_dim=32, width=16, lr=1e-3, kl_anneal_steps=15, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.fc_mu = nn.Linear(4 * width * 64, latent_dim)
        self.fc_var = nn.Linear(4 * width * 64, latent_dim)
        self.decoder = nn.Sequential(
            nn.Linear(latent_dim, 4 * width * 64),
            nn.Unflatten(1, (4 * width, 8, 8)),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(4 * width, 2 * width, 3, padding=1),
            nn.ELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ELU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        self.skipped = 0

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        std = torch.exp(log_var / 2)
        z = mu + std * torch.randn_like(std)
        return self.decoder(z), mu, log_var

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if not torch.isfinite(x).all():
            self.skipped += 1
            return None

        target = x
        if batch_idx % 3 == 2:
            x = x.clone()
            x[:, :, : 4 + batch_idx, : 4 + batch_idx] = 0

        x_hat, mu, log_var = self(x)
        recon = F.mse_loss(x_hat, target, reduction="none").sum(dim=(1, 2, 3)).mean()
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(dim=1).mean()
        beta = min(1.0, self.trainer.global_step / self.hparams.kl_anneal_steps)
        loss = recon + beta * kl
        self.log_dict({"recon": recon, "kl": kl, "beta": beta, "elbo": -(recon + kl)})
        return loss

    def on_train_epoch_end(self):
        self.log("skipped", float(self.skipped))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def make_rings(n, batch_size, seed, dtype):
    """Pictures of rings; one in each of the second and the sixth batch has a broken pixel."""
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    centre = 10 + 12 * torch.rand(n, 2, generator=g)
    radius = 4 + 5 * torch.rand(n, 1, 1, generator=g)
    distance = ((ys - centre[:, 0, None, None]) ** 2 + (xs - centre[:, 1, None, None]) ** 2).sqrt()
    x = torch.exp(-((distance - radius) ** 2))[:, None]
    x = x + 0.02 * torch.randn(x.shape, generator=g)
    for number in (1, 5):
        x[number * batch_size + 3, 0, 7, 7] = float("nan")
    return TensorDataset(x.to(dtype))


def build(seed, dtype=torch.float32, *, batch_size=96, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data, whose batches keep their order."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*`training_step` returned `None`.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = VAE(dropout=dropout).to(dtype)
    dataset = make_rings(9 * batch_size, batch_size, seed, dtype)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=False)
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**flags, **trainer_flags}), model, loader
