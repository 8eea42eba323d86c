"""A DCGAN with manual optimization, after the GAN example of Lightning's documentation.

Two optimizers, toggled; a sample grid is drawn at the end of an epoch where a logger can take it.
"""

import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.model = nn.Sequential(
            nn.ConvTranspose2d(latent_dim, width * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.model(z[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(width * 4, 1, 4, 1, 0),
        )

    def forward(self, img):
        return self.model(img).flatten()


class GAN(L.LightningModule):
    def __init__(self, latent_dim=64, width=24, lr=2e-4, b1=0.5, b2=0.999, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, width)
        self.discriminator = Discriminator(width, dropout)
        self.register_buffer("validation_z", torch.randn(8, latent_dim), persistent=False)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        # train generator
        self.toggle_optimizer(optimizer_g)
        self.generated_imgs = self(z)
        valid = torch.ones(imgs.size(0)).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self.generated_imgs), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        # train discriminator
        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0)).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []

    def on_train_epoch_end(self):
        with torch.no_grad():
            sample_imgs = self(self.validation_z)
        if self.logger is not None and hasattr(self.logger.experiment, "add_images"):
            self.logger.experiment.add_images("generated", sample_imgs, self.current_epoch)


def make_digits(n, seed, dtype):
    """Bright boxes of one of ten sizes on a dark ground, between -1 and 1."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=g)
    imgs = -torch.ones(n, 1, 32, 32)
    corners = torch.randint(2, 12, (n, 2), generator=g)
    for i, (top, left) in enumerate(corners.tolist()):
        side = 6 + int(labels[i])
        imgs[i, 0, top : top + side, left : left + side] = 1.0
    imgs += 0.1 * torch.randn(imgs.shape, generator=g)
    return TensorDataset(imgs.clamp(-1, 1).to(dtype), labels)


def build(seed, dtype=torch.float32, *, batch_size=192, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data; each batch counts two of the trainer's steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = GAN(dropout=dropout).to(dtype)
    loader = DataLoader(
        make_digits(8 * batch_size, seed, dtype),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
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
