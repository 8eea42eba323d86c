"""Detection and segmentation, as public libraries compute them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import images, make_job, segmented

theme = Theme("public")


def pixelwise(channels=1):
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, channels, 1))


def labelled_pixels(size):
    return images(size), torch.randint(0, 3, (size, 8, 8))


@theme.loss(
    lambda: pixelwise(3),
    labelled_pixels,
    8,
    adds="no",
    source="qubvel-org/segmentation_models.pytorch segmentation_models_pytorch/losses/dice.py",
)
def dice_by_class_over_the_batch(model, x, y):
    """Dice of each class over batch and pixels; classes that are absent count zero."""
    p = model(x).log_softmax(1).exp().flatten(2)
    target = F.one_hot(y.flatten(1), 3).permute(0, 2, 1).to(p.dtype)
    overlap = (p * target).sum((0, 2))
    score = 2 * overlap / (p + target).sum((0, 2)).clamp_min(1e-7)
    return ((1 - score) * (target.sum((0, 2)) > 0)).mean()


@theme.loss(pixelwise, segmented, 8, source="Project-MONAI/MONAI monai/losses/dice.py")
def dice_of_each_image_and_class(model, batch):
    """Dice reduced over space alone, then its mean over batch and classes."""
    p, target = model(batch[0]).sigmoid(), batch[1]
    overlap = (p * target).sum((2, 3))
    return (1 - (2 * overlap + 1e-5) / ((p + target).sum((2, 3)) + 1e-5)).mean()


@theme.loss(
    lambda: pixelwise(3),
    labelled_pixels,
    8,
    source="Project-MONAI/MONAI monai/losses/dice.py (GeneralizedDiceLoss)",
)
def generalised_dice(model, batch):
    """Classes of each image are weighed by the squares of their sizes; absent ones by the rest."""
    p = model(batch[0]).softmax(1)
    target = F.one_hot(batch[1], 3).permute(0, 3, 1, 2).to(p.dtype)
    weight = 1 / target.sum((2, 3)).pow(2)
    for each in weight:
        missing = torch.isinf(each)
        each[missing] = 0.0
        each[missing] = each.max()
    overlap = ((p * target).sum((2, 3)) * weight).sum(1)
    size = ((p + target).sum((2, 3)) * weight).sum(1)
    return (1 - (2 * overlap + 1e-5) / (size + 1e-5)).mean()


@theme.loss(
    lambda: pixelwise(3), images, 8, source="kornia/kornia kornia/losses/total_variation.py"
)
def total_variation_of_each_image(model, x):
    """Total variation sums over each image, and its mean is taken."""
    y = model(x)
    across = (y[:, :, 1:] - y[:, :, :-1]).abs().sum((1, 2, 3))
    down = (y[..., 1:] - y[..., :-1]).abs().sum((1, 2, 3))
    return F.l1_loss(y, x) + 1e-2 * (across + down).mean()


def anchors(size):
    """Return images, and a class per anchor: -1 is ignored, 3 is background."""
    labels = torch.randint(-1, 4, (size, 64))
    labels[: size // 2, 20:] = 3
    return images(size), labels, torch.randn(size, 64, 4)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(6, 3, 1), nn.Conv2d(6, 4, 1)
        self.normaliser = 100.0

    def forward(self, x):
        z = self.body(x)
        return self.classes(z).flatten(2).mT, self.boxes(z).flatten(2).mT


def focal_sum(logits, labels):
    target = F.one_hot(labels, 4)[..., :3].to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = logits.sigmoid()
    return (losses * (target - p).abs().pow(2)).sum()


@theme.loss(
    Detector,
    anchors,
    8,
    adds="no",
    leaves="different",
    source="facebookresearch/detectron2 detectron2/modeling/meta_arch/retinanet.py",
)
def retinanet_with_a_moving_normaliser(model, x, labels, boxes):
    """Sums are divided by a moving mean of the number of positive anchors, a plain attribute."""
    logits, deltas = model(x)
    valid, positive = labels >= 0, (labels >= 0) & (labels != 3)
    model.normaliser = 0.9 * model.normaliser + 0.1 * max(positive.sum().item(), 1)
    total = focal_sum(logits[valid], labels[valid])
    total = total + F.l1_loss(deltas[positive], boxes[positive], reduction="sum")
    return total / model.normaliser


@theme.loss(Detector, anchors, 8, source="pytorch/vision torchvision/models/detection/retinanet.py")
def retinanet_by_image(model, batch):
    """Each image's sums are divided by its own positives, in a loop; then comes the mean."""
    losses = []
    for logits, deltas, labels, boxes in zip(*model(batch[0]), batch[1], batch[2], strict=True):
        valid, positive = labels >= 0, torch.where((labels >= 0) & (labels != 3))[0]
        total = focal_sum(logits[valid], labels[valid])
        total = total + F.l1_loss(deltas[positive], boxes[positive], reduction="sum")
        losses.append(total / max(1, positive.numel()))
    return sum(losses) / max(1, len(losses))


@theme.loss(Detector, anchors, 8, adds="no", source="facebookresearch/detr models/detr.py")
def detr_criterion(model, x, labels, boxes):
    """Background counts a tenth in a weighted mean; boxes are divided by the batch's number."""
    logits, deltas = model(x)
    background = deltas.new_zeros(*logits.shape[:2], 1)
    logits = torch.cat([logits, background], dim=-1)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.1])
    labels = labels.clamp(min=0)
    real = (labels != 3).to(logits.dtype).unsqueeze(-1)
    num_boxes = max(real.sum().item(), 1)
    value = F.cross_entropy(logits.mT, labels, weight)
    return value + 5 * ((deltas - boxes).abs() * real).sum() / num_boxes


@theme.loss(
    pixelwise,
    segmented,
    8,
    adds="sum",
    source="ultralytics/yolov5 utils/loss.py (the objectness term)",
)
def objectness_times_the_batch_size(model, x, y):
    """A mean over all cells, multiplied by the batch size."""
    value = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))(model(x), y)
    return 0.7 * value * x.shape[0]


@theme.case(adds="no", leaves="different", source="ultralytics/yolov5 utils/loss.py")
def yolo_with_autobalance():
    """Objectness over cells and boxes over targets; the balance follows the loss's own values."""

    class Balanced:
        def __init__(self):
            self.balance = [4.0, 1.0]

        def __call__(self, model, batch):
            x, labels, boxes = batch
            logits, deltas = model(x)
            positive = (labels >= 0) & (labels < 3)
            target = positive.to(logits.dtype)
            total = (deltas[positive] - boxes[positive]).abs().mean()
            for level in range(2):
                value = F.binary_cross_entropy_with_logits(logits[..., level], target)
                total = total + self.balance[level] * value
                self.balance[level] = 0.99 * self.balance[level] + 0.01 / value.detach().item()
            self.balance = [each / self.balance[1] for each in self.balance]
            return total * x.shape[0]

    return make_job(Detector, anchors, Balanced(), 8)


@theme.loss(pixelwise, segmented, 8, source="Project-MONAI/MONAI monai/losses/focal_loss.py")
def focal_of_each_pixel(model, batch):
    """Focal loss of each pixel, meaned over all."""
    z, y = model(batch[0]), batch[1]
    value = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    invisible = F.logsigmoid(-z * (y * 2 - 1))
    return ((invisible * 2.0).exp() * value).mean()


@theme.loss(
    pixelwise,
    segmented,
    8,
    adds="no",
    source="Project-MONAI/MONAI monai/losses/dice.py (batch=True)",
)
def dice_with_the_batch_reduced(model, batch):
    """Dice of each class with the batch reduced before the fraction is taken."""
    p, target = model(batch[0]).sigmoid(), batch[1]
    overlap, size = (p * target).sum((0, 2, 3)), (p + target).sum((0, 2, 3))
    return (1 - (2 * overlap + 1e-5) / (size + 1e-5)).mean()


@theme.loss(pixelwise, images, 8, source="Project-MONAI/MONAI monai/losses/image_dissimilarity.py")
def local_cross_correlation(model, x):
    """Local normalised cross-correlation of each image with its target, as registration has it."""
    y, target = model(x), x[:, :1]
    my, mt = F.avg_pool2d(y, 3, 1), F.avg_pool2d(target, 3, 1)
    cross = F.avg_pool2d(y * target, 3, 1) - my * mt
    vy = F.avg_pool2d(y * y, 3, 1) - my * my
    vt = F.avg_pool2d(target * target, 3, 1) - mt * mt
    return -((cross * cross + 1e-5) / (vy * vt + 1e-5)).mean()
