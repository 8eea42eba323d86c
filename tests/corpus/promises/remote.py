"""What the jobs of ``odd_state`` reach only by an import, a registry or an attribute."""

from __future__ import annotations

import functools
import random
from collections import deque
from typing import Any, ClassVar

import numpy as np
import torch
from tests.corpus.promises.case import WIDTH, layers
from torch import Tensor, nn

CALLS = 0
HISTORY: list[float] = []
RECENT: deque[float] = deque(maxlen=4)
NOISE = np.random.default_rng(7)
CHOICES = random.Random(7)
REGISTRY: dict[str, type[nn.Module]] = {}


def register(kind: type[nn.Module]) -> type[nn.Module]:
    """Enter a class into the registry."""
    REGISTRY[kind.__name__] = kind
    return kind


def count() -> int:
    """Count a call in the module's global."""
    global CALLS  # noqa: PLW0603  # the state in question
    CALLS += 1
    return CALLS


class CountsInGlobal(nn.Module):
    """Scales by a count in this module's global."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        return x * (1 + 0.1 * count())


@register
class CountsInClass(nn.Module):
    """Scales by a count on its class."""

    num_calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        type(self).num_calls += 1
        return x * (1 + 0.1 * self.num_calls)


class RemembersLosses(nn.Module):
    """Adds the mean of what it has seen so far."""

    def forward(self, x: Tensor) -> Tensor:
        """Shift ``x``."""
        HISTORY.append(0.1 * len(HISTORY))
        return x + sum(HISTORY) / len(HISTORY)


class RemembersFew(nn.Module):
    """Adds the number of the last calls, kept in a deque."""

    def forward(self, x: Tensor) -> Tensor:
        """Shift ``x``."""
        RECENT.append(len(RECENT) * 0.1)
        return x + sum(RECENT)


class DrawsByNumpy(nn.Module):
    """Adds one draw of a module's numpy generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Shift ``x``."""
        return x + float(NOISE.normal())


class SkipsByChance(nn.Module):
    """Skips its layer as a module's own random numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Go through the layer, or not."""
        return x + 0.5 * self.layer(x) if CHOICES.random() < 0.5 else x


class ScalesBackward(torch.autograd.Function):
    """Scales the gradient by the number of times that it went back."""

    num_backwards: ClassVar[list[int]] = [0]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Hand ``x`` on."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Scale the gradient."""
        del ctx
        ScalesBackward.num_backwards[0] += 1
        return gradients[0] * (1 + 0.1 * ScalesBackward.num_backwards[0])


class GoesBackScaled(nn.Module):
    """Uses ``ScalesBackward``."""

    def forward(self, x: Tensor) -> Tensor:
        """Hand ``x`` on."""
        return ScalesBackward.apply(x)


class SlowingSGD(torch.optim.SGD):
    """Lowers its rate with the number of all updates, which its class keeps."""

    updates: ClassVar[int] = 0

    def step(self, closure: Any = None) -> Any:
        """Update at the lowered rate."""
        type(self).updates += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / type(self).updates
        return super().step(closure)


class Meter:
    """Counts for whoever asks for the one that there is."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> int:
        """Count."""
        self.ticks += 1
        return self.ticks


@functools.lru_cache(maxsize=1)
def meter() -> Meter:
    """Return the one meter."""
    return Meter()


class AsksMeter(nn.Module):
    """Scales by the one meter's count."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        return x * (1 + 0.1 * meter().tick())


class ImportsInForward(nn.Module):
    """Counts in another module, which it imports in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        from tests.corpus.promises import farther

        farther.COUNTS["forward"] += 1
        return x * (1 + 0.1 * farther.COUNTS["forward"])


class HoldsByName(nn.Module):
    """Keeps a count under a name that is made as it runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        name = f"calls_of_{type(self).__name__}"
        globals()[name] = globals().get(name, 0) + 1
        return x * (1 + 0.1 * globals()[name])


def build(kind: str) -> nn.Module:
    """Build the usual layers with one of this module's classes in their middle."""
    return layers(globals()[kind]())
