"""Jobs that several optimizers train, and what their runs end with."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import memfit
from memfit import Job, Plan, Total

OPTIMIZERS = {
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True, weight_decay=0.1),
    "adam-foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "adam-fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "adam-tensor-lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05)),
    "adamax": partial(torch.optim.Adamax, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, maximize=True),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
    "nadam": partial(torch.optim.NAdam, lr=0.05),
    "radam": partial(torch.optim.RAdam, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.05, momentum=0.9, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.05),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "sgd-plain": partial(torch.optim.SGD, lr=0.05),
}


class Foreign(torch.optim.SGD):
    """An optimizer from outside torch.optim."""


def with_own_step(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step = lambda closure=None: None
    return optimizer


def hooked_before(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Tied(nn.Module):
    """A weight that is used twice, and another one in between."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.between = nn.Linear(width, width)

    def forward(self, ids):
        return torch.tanh(self.between(self.table(ids))) @ self.table.weight.t()


def tied_job(optimizer=OPTIMIZERS["adam"]) -> Job:
    """Return a job over ragged rows whose loss is a sum and a count."""

    def loss(model, ids):
        losses = nn.functional.cross_entropy(model(ids), ids.roll(1, 0), reduction="none")
        kept = ids > 2
        return Total((losses * kept).sum(), kept.sum())

    return Job(
        model=lambda: Tied().double(),
        batch=lambda size: torch.arange(size) % 12,
        loss=loss,
        optimizer=optimizer,
        batch_size=16,
    )


def trained(job: Job, plan: Plan, num_steps: int = 4) -> memfit.Run:
    """Run a few steps from the same start."""
    torch.manual_seed(0)
    run = memfit.start(job, plan)
    for _ in range(num_steps):
        run.step(job.batch(job.batch_size))
    return run


def tensors_of(state) -> list[torch.Tensor]:
    """List the tensors of a checkpoint; states of the optimizer in the order of parameters."""
    states = [state["optimizer"]["state"][key] for key in sorted(state["optimizer"]["state"])]
    leaves = torch.utils._pytree.tree_leaves((state["model"], states))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_same(first: memfit.Run, second: memfit.Run) -> None:
    """Compare parameters and optimizer states."""
    expected, found = first.state_dict(), second.state_dict()
    assert expected["optimizer"]["param_groups"] == found["optimizer"]["param_groups"]
    pairs = zip(tensors_of(expected), tensors_of(found), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in pairs)
