"""Image classification, its layers and its augmentations, as public libraries compute them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import classifier, cross_entropy, labelled, labelled_images, make_job

theme = Theme("public")


def multi_label(size):
    x, _ = labelled(size)
    return x, (torch.rand(size, 4) < 0.3).float()


def asymmetric(logits, y):
    p = logits.sigmoid()
    q = (1 - p + 0.05).clamp(max=1)
    losses = y * p.clamp(min=1e-8).log() + (1 - y) * q.clamp(min=1e-8).log()
    kept = p * y + q * (1 - y)
    return -(losses * (1 - kept).pow(y + 4 * (1 - y))).sum()


@theme.case(
    adds="sum", source="huggingface/pytorch-image-models timm/loss/asymmetric_loss.py (sum)"
)
def asymmetric_loss_summed():
    """Asymmetric loss as its paper reduces it: summed."""
    return make_job(classifier, multi_label, lambda m, b: asymmetric(m(b[0]), b[1]))


@theme.case(source="huggingface/pytorch-image-models timm/loss/asymmetric_loss.py (batchmean)")
def asymmetric_loss_over_the_batch():
    """Asymmetric loss summed over classes and meaned over the batch."""
    return make_job(classifier, multi_label, lambda m, b: asymmetric(m(b[0]), b[1]) / len(b[0]))


def jensen_shannon(logits, y):
    parts = logits.chunk(3)
    clean = F.cross_entropy(parts[0], y, label_smoothing=0.1)
    probabilities = [part.softmax(1) for part in parts]
    mixture = torch.stack(probabilities).mean(0).clamp(1e-7, 1).log()
    spread = sum(F.kl_div(mixture, p, reduction="batchmean") for p in probabilities)
    return clean + 12 * spread / 3


def three_views(size):
    x, y = labelled(size)
    return [x, x + 0.3 * torch.randn(size, 12), x + 0.3 * torch.randn(size, 12)], y


@theme.loss(classifier, three_views, source="huggingface/pytorch-image-models timm/loss/jsd.py")
def augmix_concatenated_in_the_loss(model, batch):
    """Clean and augmented views come apart and are concatenated for one forward."""
    return jensen_shannon(model(torch.cat(batch[0])), batch[1])


def concatenated_views(size):
    x, y = labelled(size)
    return torch.cat([x, x + 0.3 * torch.randn(size, 12), x + torch.randn(size, 12)]), y


@theme.loss(
    classifier,
    concatenated_views,
    adds="no",
    source="huggingface/pytorch-image-models timm/loss/jsd.py",
)
def augmix_concatenated_by_the_loader(model, batch):
    """The loader concatenates the views: the first third is clean, so rows are no samples."""
    return jensen_shannon(model(batch[0]), batch[1])


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def head(width):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


@theme.model(
    labelled_images,
    cross_entropy,
    8,
    source="huggingface/pytorch-image-models timm/layers/std_conv.py",
)
def weight_standardisation_by_batch_norm():
    """``F.batch_norm`` in training mode, but of weights: no sample meets another."""
    return nn.Sequential(
        StandardisedConv(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), head(6)
    )


class EvoNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.v = nn.Parameter(torch.ones(1, 6, 1, 1)), nn.Parameter(torch.ones(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x):
        var = x.var(dim=(0, 2, 3), unbiased=False)
        self.running_var.lerp_(var.detach(), 0.1)
        own = (x.var(dim=(2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
        scale = torch.max((var + 1e-5).sqrt().view(1, -1, 1, 1), self.v.view(1, -1, 1, 1) * x + own)
        return x / scale * self.gain


@theme.model(
    labelled_images,
    cross_entropy,
    8,
    adds="no",
    leaves="different",
    recompute_unsafe=True,
    source="huggingface/pytorch-image-models timm/layers/evo_norm.py",
)
def evo_norm_of_the_batch():
    """The larger of the batch's deviation and the sample's own divides activations."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), EvoNorm(), head(6))


class ResponseNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.tau = nn.Parameter(torch.ones(1, 6, 1, 1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(dim=(2, 3), keepdim=True) + 1e-5)
        total = x.norm(p=2, dim=(2, 3), keepdim=True)
        return torch.max(self.gain * x * (total / (total.mean(1, keepdim=True) + 1e-6)), self.tau)


@theme.model(
    labelled_images,
    cross_entropy,
    8,
    source="huggingface/pytorch-image-models timm/layers/filter_response_norm.py, grn.py",
)
def response_norms_of_each_image():
    """Filter response and global response normalisation: statistics of each image's own."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), ResponseNorm(), head(6))


@theme.case(
    draws="per-sample", source="huggingface/pytorch-image-models timm/layers/patch_dropout.py"
)
def patch_dropout():
    """Each image keeps half of its patches, drawn by sorting noise."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(12, 8), nn.Linear(8, 4)

        def forward(self, x):
            z = self.embed(x)
            kept = torch.argsort(torch.randn(z.shape[:2]), dim=-1)[:, :3]
            z = z.gather(1, kept.unsqueeze(-1).repeat(1, 1, z.shape[-1]))
            return self.head(torch.relu(z).mean(1))

    def batch(size):
        return torch.randn(size, 6, 12), labelled(size)[1]

    return make_job(Patches, batch, cross_entropy)


def weak_and_strong(size):
    x, y = labelled(size)
    weak = torch.randn(2 * size, 12)
    return x, y, weak, weak + 0.3 * torch.randn(2 * size, 12)


@theme.loss(classifier, weak_and_strong, source="kekmodel/FixMatch-pytorch train.py")
def fixmatch(model, x, y, weak, strong):
    """Labelled and unlabelled inputs, twice as many, in one forward; sure pseudo-labels count."""
    logits = model(torch.cat((x, weak, strong)))
    teacher, student = logits[len(x) :].chunk(2)
    confidence, label = teacher.detach().softmax(-1).max(-1)
    sure = confidence.ge(0.3).to(logits.dtype)
    unlabelled = (F.cross_entropy(student, label, reduction="none") * sure).mean()
    return F.cross_entropy(logits[: len(x)], y) + unlabelled


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(12, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 6, 8), requires_grad=False)
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decode = nn.Linear(8, 12)

    def forward(self, patches):
        n, length, _ = patches.shape
        x = self.embed(patches) + self.position
        shuffle = torch.argsort(torch.rand(n, length), dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(x, 1, shuffle[:, :2, None].repeat(1, 1, 8))
        filled = torch.cat([self.encode(kept), self.mask_token.repeat(n, length - 2, 1)], dim=1)
        whole = torch.gather(filled, 1, restore[..., None].repeat(1, 1, 8)) + self.position
        mask = torch.ones(n, length, dtype=x.dtype)
        mask[:, :2] = 0
        mask = torch.gather(mask, 1, restore)
        losses = (self.decode(whole) - patches).pow(2).mean(-1)
        return (losses * mask).sum() / mask.sum()


@theme.case(draws="per-sample", source="facebookresearch/mae models_mae.py")
def masked_autoencoder():
    """As many patches are masked in each image, so that dividing by the mask's sum is a mean."""
    return make_job(MaskedAutoencoder, lambda size: torch.randn(size, 6, 12), lambda m, x: m(x), 8)
