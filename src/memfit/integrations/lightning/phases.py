"""Which parameters are trained now, and the training as it is once all of them are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from memfit.job import Job


def trained(trainer: Any) -> tuple[Any, ...]:
    """Identify what is trained: the parameters with gradients, and the optimizer's groups."""
    module = trainer.lightning_module
    parameters = tuple(id(each) for each in module.parameters() if each.requires_grad)
    groups = tuple(len(group["params"]) for group in trainer.optimizers[0].param_groups)
    return parameters, groups


@contextmanager
def all_trained(job: Job, module: torch.nn.Module) -> Iterator[Job]:
    """Give the job in which every parameter of a module is trained, by an optimizer of the kind.

    Args:
        job: of the parameters that are trained now.
        module: whose parameters have gradients inside, and at the end those that had before.
    """
    frozen = [each for each in module.parameters() if not each.requires_grad]
    optimizer = job.optimizer(())
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}

    def of_all(parameters: Any) -> torch.optim.Optimizer:
        return kind([*parameters], **options)  # type: ignore[no-any-return]  # a class is Any here

    for parameter in frozen:
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    try:
        yield replace(job, optimizer=of_all) if frozen else job
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
