"""A small model with something beside its main path, and the CPU taken for two devices."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from memfit import Job, Plan
from memfit.strategies import HostModules
from memfit.strategies.host_modules.crossing import Crossing

CARD = "a100-40gb"
WIDTH = 16
SAMPLES = 12


def under(*names: str, beside=()) -> Plan:
    return Plan(strategies=(HostModules(modules=names), *beside))


class Cloning(Crossing):
    """Take the CPU for two devices: what crosses is cloned, so that nothing is shared."""

    has_computed = False

    @property
    def is_computing(self):
        if not self._is_computing:
            self.has_computed = False
        return self._is_computing

    @contextmanager
    def computing(self):
        with super().computing():
            yield
        self.has_computed = True

    def lies_on_host(self, tensor):
        return self.has_computed

    def _copy(self, tensor, device):
        return tensor.clone()


class Around(nn.Module):
    """A layer, something beside the main path, and a layer that takes both."""

    def __init__(self, side=None, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.side = nn.Linear(width, width) if side is None else side()
        self.last = nn.Linear(width, width)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden + self.combined(hidden))

    def combined(self, hidden):
        return self.side(hidden)


def job_of(model, width: int = WIDTH, samples: int = SAMPLES, **others) -> Job:
    values = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "clip_grad_norm": 0.1,
        **others,
    }
    return Job(
        model=model,
        batch=lambda size: (torch.randn(size, width), torch.randn(size, width)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        batch_size=samples,
        **values,
    )
