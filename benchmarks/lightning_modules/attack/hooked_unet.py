"""A small U-Net whose author overrides the hooks around the optimizer.

Warm-up inside `optimizer_step`, clipping of its own in `configure_gradient_clipping`, norms of
gradients logged in `on_before_optimizer_step`; all three are recipes of Lightning's documentation.
"""

import itertools
import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader, TensorDataset


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.InstanceNorm2d(out_channels, affine=True),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.InstanceNorm2d(out_channels, affine=True),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_classes, width, depth, dropout):
        super().__init__()
        channels = [width * 2**i for i in range(depth)]
        self.inc = DoubleConv(3, width)
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in itertools.pairwise(channels))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(channels)
        )
        self.up_convs = nn.ModuleList(DoubleConv(2 * a, a) for a in channels[:-1])
        self.dropout = nn.Dropout2d(dropout)
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = self.dropout(skips.pop())
        for up, conv in zip(reversed(self.ups), reversed(self.up_convs), strict=True):
            x = conv(torch.cat([skips.pop(), up(x)], dim=1))
        return self.outc(x)


class LitUNet(L.LightningModule):
    def __init__(self, n_classes=4, width=12, depth=3, lr=1e-3, warmup_steps=8, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet(n_classes, width, depth, dropout)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, mask = batch
        logits = self(x)
        ce = F.cross_entropy(logits, mask)
        probs = logits.softmax(dim=1)
        target = F.one_hot(mask, self.hparams.n_classes).movedim(-1, 1).to(probs.dtype)
        overlap = 2 * (probs * target).sum(dim=(0, 2, 3))
        dice = 1 - ((overlap + 1) / ((probs + target).sum(dim=(0, 2, 3)) + 1)).mean()
        loss = ce + dice
        self.log_dict({"loss/ce": ce, "loss/dice": dice, "loss/total": loss})
        return loss

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        # warm up after the step, for the next one
        if self.trainer.global_step < self.hparams.warmup_steps:
            lr_scale = min(1.0, float(self.trainer.global_step + 1) / self.hparams.warmup_steps)
            for pg in optimizer.param_groups:
                pg["lr"] = lr_scale * self.hparams.lr

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self.net, norm_type=2)
        self.log("grad_2.0_norm_total", norms["grad_2.0_norm_total"])
        if self.trainer.global_step % 5 == 0:
            self.log_dict({k: v for k, v in norms.items() if "inc" in k or "outc" in k})

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        # loose at first, tighter later
        clip = gradient_clip_val if gradient_clip_val is not None else 1.0
        if self.trainer.global_step < self.hparams.warmup_steps:
            clip = clip * 2
        self.clip_gradients(
            optimizer,
            gradient_clip_val=clip,
            gradient_clip_algorithm=gradient_clip_algorithm or "norm",
        )

    def configure_optimizers(self):
        return torch.optim.RMSprop(
            self.parameters(), lr=self.hparams.lr / self.hparams.warmup_steps, momentum=0.9
        )


def make_shapes(n, seed, dtype, size=64):
    """Pictures with a disc, a box and a band, and the mask that says which is where."""
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(12, size - 12, (n, 3, 2), generator=g)
    dy = ys - centre[:, :, 0, None, None]
    dx = xs - centre[:, :, 1, None, None]
    mask = torch.zeros(n, size, size, dtype=torch.long)
    mask[dy[:, 0].abs() < 4] = 1
    mask[(dy[:, 1].abs() < 9) & (dx[:, 1].abs() < 9)] = 2
    mask[dy[:, 2] ** 2 + dx[:, 2] ** 2 < 100] = 3
    colours = torch.randn(4, 3, generator=g)
    x = colours[mask].movedim(-1, 1) + 0.4 * torch.randn(n, 3, size, size, generator=g)
    return TensorDataset(x.to(dtype), mask)


def build(seed, dtype=torch.float32, *, batch_size=16, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = LitUNet(dropout=dropout).to(dtype)
    loader = DataLoader(
        make_shapes(10 * batch_size, seed, dtype),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**flags, **trainer_flags}), model, loader
