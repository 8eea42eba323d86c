"""Buffers that a guarded step has to be able to put back."""

from __future__ import annotations

import torch
from tests.corpus.promises.case import WIDTH, case, images, layers, make_job
from torch import Tensor, nn

from memfit import Job


class Running(nn.Module):
    """Writes the number of its calls into a large buffer."""

    def __init__(self, num_entries: int, *, persistent: bool = True, used: bool = False) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("kept", torch.zeros(num_entries), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        """Hand ``x`` on, or shift it."""
        self.kept += 1
        return x + 0.1 * self.kept[0] if self.used else x


class Queue(nn.Module):
    """Keeps the features of the last batches, and shifts by their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4096, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Shift ``x`` and enqueue it."""
        out = x + self.queue.mean(0)
        places = (self.place + torch.arange(len(x))) % len(self.queue)
        self.queue[places] = x.detach()
        self.place += len(x)
        return out


class Teacher(nn.Module):
    """A student, and a moving average of it that says what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers(), layers().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Move the average on and subtract it."""
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.05)
            aim = self.teacher(x)
        return self.student(x) - 0.5 * aim


class Reassigns(nn.Module):
    """Puts a new tensor in its buffer's place in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1 << 18))

    def forward(self, x: Tensor) -> Tensor:
        """Shift ``x``."""
        self.mean = self.mean * 0.9 + 0.1
        return x + self.mean[0]


class Codebook(nn.Module):
    """Vector quantisation whose codes follow the features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Quantise ``x``, straight through."""
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        codes = self.codes[nearest]
        sums = torch.zeros_like(self.codes).index_add_(0, nearest, x.detach())
        counts = torch.bincount(nearest, minlength=32).clamp(min=1)[:, None]
        self.codes.lerp_(sums / counts, 0.1)
        return x + (codes - x).detach()


def _convolutions() -> nn.Module:
    blocks = []
    for width in (3, 16, 16):
        blocks += [nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))


@case
def large_buffer() -> Job:
    """8 MiB that change in place."""
    return make_job(lambda: layers(Running(1 << 21), depth=12))


@case
def large_buffer_that_is_used() -> Job:
    """4 MiB that change in place and shift."""
    return make_job(lambda: layers(Running(1 << 20, used=True), depth=12))


@case
def buffer_outside_of_checkpoints() -> Job:
    """A buffer that no checkpoint holds."""
    return make_job(lambda: layers(Running(1 << 20, persistent=False), depth=12))


@case
def many_buffers() -> Job:
    """Forty small ones."""
    return make_job(lambda: layers(*(Running(1 << 12) for _ in range(40)), depth=12))


@case
def batch_norm() -> Job:
    """Batch normalisation."""
    return make_job(_convolutions, images)


@case
def feature_queue() -> Job:
    """A queue of features."""
    return make_job(lambda: layers(Queue(), depth=12))


@case
def moving_teacher() -> Job:
    """A teacher that follows the student."""
    return make_job(Teacher)


@case
def reassigned_buffer() -> Job:
    """A buffer that is made anew in each call."""
    return make_job(lambda: layers(Reassigns(), depth=12))


@case
def codebook() -> Job:
    """Codes that follow the features of the batch."""
    return make_job(lambda: layers(Codebook(), depth=12))


@case
def spectral_norm() -> Job:
    """Power iteration in buffers."""

    def model() -> nn.Module:
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        return layers(linear, depth=12)

    return make_job(model)


@case
def buffer_in_the_loss() -> Job:
    """A running mean that the loss holds."""
    running = torch.zeros(1 << 18)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        error = (model(batch[0]) - batch[1]).square().mean()
        running.mul_(0.9).add_(0.1 * error.detach().to(running.dtype))
        return error

    return make_job(lambda: layers(depth=12), loss=loss)
