"""Borrows what a job's functions return that already lives, and gives it back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.devices.spec import CPU
from memfit.job import Job, Total
from memfit.session.stand_ins import (
    Maker,
    NamedTensors,
    StandIns,
    living_tensors,
    module_tensors,
    optimizer_tensors,
)

Lives = Callable[[torch.Tensor], bool]


@contextmanager
def borrowed_to_record(job: Job, mode: FakeTensorMode) -> Iterator[Job]:
    """Give a job whose functions return what can be recorded, wherever it comes from.

    Models that are built under the mode consist of its fake tensors and are taken as they are. In
    those that live, fake tensors stand in for real ones until the end.

    Raises:
        HeldTensorError: if a tensor cannot be replaced.
    """

    def lives(tensor: torch.Tensor) -> bool:
        return not (isinstance(tensor, FakeTensor) and tensor.fake_mode is mode)

    with _borrowed(job, _fake_memory, lives) as borrowed_job:
        yield borrowed_job


@contextmanager
def borrowed_to_run(job: Job) -> Iterator[Job]:
    """Give a job whose steps can be carried out for real and leave everything as it was.

    Copies stand in for the tensors of models and optimizers that live already. On a GPU, where
    there may be no room for them, the originals' memory is used, and filled again from the host.
    What the job's functions build anew is taken as it is.

    Raises:
        HeldTensorError: if a tensor cannot be replaced.
    """
    before = living_tensors()  # held on to, so that no identity is given to another tensor
    known = {id(tensor) for tensor in before}
    copies = _Copies()
    try:
        with _borrowed(job, copies, lambda tensor: id(tensor) in known) as borrowed_job:
            yield borrowed_job
    finally:
        copies.put_back()
        before.clear()


@contextmanager
def _borrowed(job: Job, make: Maker, lives: Lives) -> Iterator[Job]:
    stand_ins = StandIns(make)
    try:
        yield _lent(job, stand_ins, lives)
    finally:
        stand_ins.put_back()


def _lent(job: Job, stand_ins: StandIns, lives: Lives) -> Job:
    """Give the job with functions that have their living tensors replaced."""
    models: list[torch.nn.Module] = []

    def replaced(tensors: NamedTensors, *, may_go: bool = False) -> None:
        living = [(name, tensor) for name, tensor in tensors if lives(tensor)]
        stand_ins.take_places(living, may_go=may_go)

    def model() -> torch.nn.Module:
        made = job.model()
        if isinstance(made, torch.nn.Module):
            replaced(made.named_parameters())
            replaced(module_tensors(made), may_go=True)
            models.append(made)
        return made

    def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made = job.optimizer(parameters)
        if isinstance(made, torch.optim.Optimizer):
            replaced(optimizer_tensors(made))
        stand_ins.settle()
        return made

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor | Total:
        value = job.loss(model, batch)
        if models and stand_ins.count:
            # What a forward binds anew would be kept by the stand-in for the old one.
            stand_ins.keep_only(tensor for made in models for _, tensor in module_tensors(made))
        models.clear()
        return value

    return replace(job, model=model, optimizer=optimizer, loss=loss)


class _Copies:
    """Copy memory, or, on a GPU, lend it and fill it again at the end."""

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, memory: torch.Tensor) -> torch.Tensor:
        if memory.device.type == CPU:
            return memory.clone()
        self._lent.append((memory, memory.cpu()))
        return memory

    def put_back(self) -> None:
        """Fill the memory that was lent."""
        with torch.no_grad():
            for memory, before in self._lent:
                memory.copy_(before)
        self._lent.clear()


def _fake_memory(memory: torch.Tensor) -> torch.Tensor:
    if isinstance(memory, FakeTensor):
        return memory
    return torch.empty(memory.shape, dtype=memory.dtype, device=memory.device)
