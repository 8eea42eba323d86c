"""Blocks whose forward reads and changes more than its input: what a second run must not do twice.

Each takes and gives tensors of shape (N, width) and reads what it changes, so that an effect that
is lost, or has happened twice, shows in the loss.
"""

from __future__ import annotations

import collections
import io
import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

TOTALS = {"calls": 0}
NUM_GLOBAL_CALLS = 0


class Block(nn.Module):
    """A linear layer with a nonlinearity, and an effect to be added by the subclass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.prepare(width)

    def prepare(self, width: int) -> None:
        """Make what the effect needs."""

    def hidden(self, x):
        return torch.tanh(self.linear(x))


class SpectralParametrized(Block):
    def prepare(self, width):
        nn.utils.parametrizations.spectral_norm(self.linear)

    def forward(self, x):
        return x + self.hidden(x)


class SpectralHooked(Block):
    def prepare(self, width):
        nn.utils.spectral_norm(self.linear)

    def forward(self, x):
        return x + self.hidden(x)


class Counting(Block):
    def prepare(self, width):
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return x + self.hidden(x) * (1 + 0.1 * self.num_calls)


class GlobalCounting(Block):
    def forward(self, x):
        global NUM_GLOBAL_CALLS  # noqa: PLW0603 - that is the effect
        NUM_GLOBAL_CALLS += 1
        TOTALS["calls"] += 1
        return x + self.hidden(x) * (1 + 0.1 * NUM_GLOBAL_CALLS + 0.01 * TOTALS["calls"])


class ClosureCounting(Block):
    def prepare(self, width):
        num_calls = 0

        def factor():
            nonlocal num_calls
            num_calls += 1
            return 1 + 0.1 * num_calls

        self.factor = factor

    def forward(self, x):
        return x + self.hidden(x) * self.factor()


class HookCounting(Block):
    def prepare(self, width):
        seen = []

        def scaled(module, args, out):
            seen.append(len(seen))
            return out * (1 + 0.1 * len(seen))

        self.linear.register_forward_hook(scaled)

    def forward(self, x):
        return x + self.hidden(x)


class BufferCounting(Block):
    """Counts in a buffer, through ``.data``, which autograd is not told of."""

    def prepare(self, width):
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.num_calls.data.add_(1)
        return x + self.hidden(x) * (1 + 0.1 * self.num_calls)


class LateBuffer(Block):
    """Begins to change a buffer only in its fifth call."""

    def prepare(self, width):
        self.num_calls = 0
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls > 4:
            self.mean.data.mul_(0.5).add_(0.25)
        return x + self.hidden(x + self.mean)


class Recurrent(Block):
    """Keeps its state between steps."""

    def prepare(self, width):
        self.state = None

    def forward(self, x):
        state = torch.zeros_like(x) if self.state is None else self.state
        out = torch.tanh(self.linear(x) + 0.5 * state)
        self.state = out.detach()
        return x + out


class RecurrentInPlace(Block):
    """Keeps its state in an attribute that is no buffer, and overwrites it."""

    def prepare(self, width):
        self.state = torch.zeros(width, dtype=torch.float64)

    def forward(self, x):
        out = torch.tanh(self.linear(x) + self.state)
        with torch.no_grad():
            self.state.copy_(out.mean(0))
        return x + out


class VectorQuantised(Block):
    """A codebook that follows the means of what falls to each entry, as VQ-VAE with EMA."""

    def prepare(self, width):
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * width).view(4, width).double())
        self.register_buffer("sizes", torch.ones(4, dtype=torch.float64))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        hidden = self.hidden(x)
        chosen = F.one_hot(torch.cdist(hidden, self.codes).argmin(1), 4).to(hidden.dtype)
        quantised = chosen @ self.codes
        with torch.no_grad():
            self.sizes.data.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.sums.data.mul_(0.9).add_(0.1 * chosen.T @ hidden)
            self.codes.data.copy_(self.sums / self.sizes[:, None])
        return x + hidden * (hidden - quantised.detach()).square().mean() + quantised


class OwnStatistics(Block):
    """Normalises by running statistics of its own."""

    def prepare(self, width):
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))

    def forward(self, x):
        hidden = self.hidden(x)
        out = x + hidden * (1 + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return out


class InstanceNormalised(Block):
    def prepare(self, width):
        self.norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def forward(self, x):
        return x + self.norm(self.hidden(x)[:, None])[:, 0] + self.norm.running_mean


class BatchNormalised(Block):
    def prepare(self, width):
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + self.norm(self.hidden(x))


class OwnGenerator(Block):
    def prepare(self, width):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        mask = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) < 0.5
        return x + self.hidden(x) * mask


class PythonRandom(Block):
    def forward(self, x):
        mask = [random.random() < 0.5 for _ in range(x.shape[1])]
        return x + self.hidden(x) * torch.tensor(mask)


class NumpyRandom(Block):
    def forward(self, x):
        mask = np.random.rand(x.shape[1]) < 0.5
        return x + self.hidden(x) * torch.from_numpy(mask)


class OwnNumpyRandom(Block):
    def prepare(self, width):
        self.source = np.random.default_rng(5)
        self.other = random.Random(5)

    def forward(self, x):
        mask = self.source.random(x.shape[1]) < 0.5
        return x + self.hidden(x) * torch.from_numpy(mask) * self.other.random()


class GlobalDropout(Block):
    def forward(self, x):
        return x + F.dropout(self.hidden(x), 0.5)


class Listing(Block):
    def prepare(self, width):
        self.features = []

    def forward(self, x):
        hidden = self.hidden(x)
        self.features.append(hidden.detach())
        return x + hidden * (1 + 0.1 * len(self.features))


class Remembering(Block):
    """Keeps a moving mean in a dictionary and its history in a queue."""

    def prepare(self, width):
        self.means = {}
        self.history = collections.deque(maxlen=2)

    def forward(self, x):
        hidden = self.hidden(x)
        before = self.means.get("hidden", 0.0)
        self.means["hidden"] = 0.9 * before + 0.1 * hidden.detach().mean()
        self.history.append(self.means["hidden"])
        return x + hidden * (1 + sum(self.history))


class Memory:
    """An object that is no module."""

    def __init__(self, width: int) -> None:
        self.vector = torch.zeros(width, dtype=torch.float64)
        self.num_writes = 0


class WithMemory(Block):
    def prepare(self, width):
        self.memory = Memory(width)

    def forward(self, x):
        hidden = self.hidden(x + self.memory.vector)
        self.memory.vector.lerp_(hidden.detach().mean(0), 0.1)
        self.memory.num_writes += 1
        return x + hidden * self.memory.num_writes


class Following(Block):
    """A teacher that follows the weights, moved in forward."""

    def prepare(self, width):
        self.teacher = nn.Linear(width, width).requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.linear.weight, 0.1)
        return x + self.hidden(x) + self.teacher(x).tanh()


class Clipping(Block):
    """Shrinks its weight before it is used, through ``.data``."""

    def forward(self, x):
        self.linear.weight.data.mul_(0.9)
        return x + self.hidden(x)


class Queueing(Block):
    """A queue of former features beside a place to write to, as in MoCo."""

    def prepare(self, width):
        self.register_buffer("queue", torch.zeros(8, width, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        hidden = self.hidden(x)
        scores = (hidden @ self.queue.clone().T).tanh().mean()
        self.queue[self.place] = hidden.detach().mean(0)
        self.place[0] = (self.place[0] + 1) % 8
        return x + hidden * (1 + scores)


class LazilyBuilt(Block):
    """Makes a buffer in its first call, and counts on it."""

    def forward(self, x):
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.zeros(x.shape[1], dtype=x.dtype))
        self.offset += 0.1
        return x + self.hidden(x + self.offset)


class WithViews(Block):
    """Reads through a view what it writes through the buffer."""

    def prepare(self, width):
        self.register_buffer("table", torch.zeros(2, width, dtype=torch.float64))
        self.row = self.table[1]

    def forward(self, x):
        self.table.add_(0.1)
        return x + self.hidden(x + self.row)


class Iterating(Block):
    """Takes a factor from an iterator, which cannot be put back."""

    def prepare(self, width):
        self.factors = (1 + 0.1 * number for number in itertools.count())

    def forward(self, x):
        return x + self.hidden(x) * next(self.factors)


class Reading(Block):
    """Reads a factor from an open file, which cannot be put back."""

    def prepare(self, width):
        self.file = io.StringIO()
        self.file.write("\n".join(str(1 + 0.1 * number) for number in range(100)))
        self.file.seek(0)

    def forward(self, x):
        return x + self.hidden(x) * float(self.file.readline())


NEVER_BATCH = (
    SpectralParametrized,
    SpectralHooked,
    Counting,
    GlobalCounting,
    ClosureCounting,
    HookCounting,
    BufferCounting,
    LateBuffer,
    Following,
    Clipping,
    LazilyBuilt,
    WithViews,
)
"""What they leave behind does not depend on the batch."""
ON_BATCH = (
    Recurrent,
    RecurrentInPlace,
    VectorQuantised,
    OwnStatistics,
    InstanceNormalised,
    Listing,
    Remembering,
    WithMemory,
    Queueing,
)
"""What they leave behind depends on the batch."""
DRAWING = (OwnGenerator, PythonRandom, NumpyRandom, OwnNumpyRandom, GlobalDropout)
REFUSED = (Iterating, Reading)
