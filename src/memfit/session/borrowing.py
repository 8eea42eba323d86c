"""Borrows what a job's functions return that already lives, and gives it back as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.devices.spec import CPU
from memfit.errors import HeldTensorError
from memfit.forward_state import tensors_held
from memfit.job import Job, Total, build_optimizer
from memfit.live_state import LiveState
from memfit.live_state.imports import imports_seen
from memfit.live_state.reach import LARGE_BYTES
from memfit.live_state.reading import contents_of, reaches, tensors_of
from memfit.live_state.tensors import bytes_of, has_content
from memfit.session.stand_ins import (
    Maker,
    NamedTensors,
    StandIns,
    living,
    module_tensors,
    optimizer_tensors,
)
from memfit.trace.subclasses import inside_of, parts_of

BATCH = "batch function"
"""How the state that a job's functions reach is named after the one that makes batches."""

Keep = Callable[[object], None]
Lives = Callable[[torch.Tensor], bool]


@contextmanager
def left_alone(
    job: Job, *, copies_content: bool = True, only: Collection[str] = ()
) -> Iterator[None]:
    """Put back at the end whatever the job's functions have changed, and all random states.

    Args:
        job: whose functions are called inside.
        only: the names of those that are, where not all are.
        copies_content: whether the content of tensors and arrays may change; false where only fake
            tensors are computed with.

    Raises:
        MemfitError: if something could not be put back.

    Limits: the content of data sets, which only the batch function reaches and which are large, is
    taken to stay.
    """
    with _put_back(_state_of(job, copies_content=copies_content, only=only)):
        yield


def _state_of(
    job: Job,
    leave_out: Sequence[Any] = (),
    *,
    copies_content: bool = True,
    only: Collection[str] = (),
) -> LiveState:
    """Find what a job's functions reach; the content of data sets stays as it is."""
    functions = _functions_of(job)
    return LiveState(
        {name: functions[name] for name in only or functions},
        beside=functions.values(),
        leave_out=[*leave_out, *(_data_sets(job) if copies_content else ())],
        most_bytes=sys.maxsize,
        copies_content=copies_content,
        copied=_copied_by_numpy,
    )


def _copied_by_numpy(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy bytes where torch's allocator does not count them: a step may be measured meanwhile."""
    return torch.from_numpy(np.concatenate([each.cpu().numpy() for each in parts]))


@contextmanager
def _put_back(state: LiveState) -> Iterator[Keep]:
    """Put a state back at the end, and what was met meanwhile as it was when it was met.

    Gives what is told of objects that the job's functions have made, before their code runs.
    """
    with ExitStack() as stack:
        stack.callback(state.snapshot().restore)

        def keep(made: object, modules: Sequence[ModuleType] = ()) -> None:
            stack.callback(state.snapshot_behind(made, modules).restore)

        with imports_seen(state.own_packages, lambda module: keep(None, [module])):
            yield keep


@contextmanager
def borrowed_to_record(
    job: Job, mode: FakeTensorMode, device_type: str = CPU, *, builds_model: bool = False
) -> Iterator[Job]:
    """Give a job whose functions return what can be recorded, wherever it comes from.

    Models that are built under the mode consist of its fake tensors and are taken as they are. In
    those that live, fake tensors stand in for real ones until the end.

    Args:
        job: whose step is recorded.
        mode: the one that is active.
        device_type: where models and optimizers are moved to. The fake tensors are made there:
            a fake parameter that is moved becomes another object, which a real one does not.
        builds_model: whether models that live already are refused, as ranks cannot share them.

    Raises:
        HeldTensorError: if a tensor cannot be replaced, or is one of a model that lives already.
        OpaqueTensorError: if one is a wrapper that does not say what it is made of.
    """

    def lives(tensor: torch.Tensor) -> bool:
        is_sparse = tensor.layout is not torch.strided and inside_of(tensor) is None
        return is_sparse or not all(
            isinstance(part, FakeTensor) and part.fake_mode is mode for part in parts_of(tensor)
        )

    state = _state_of(job, copies_content=False)
    with _put_back(state) as keep:
        loan = _Loan(job, StandIns(_fake_memory), lives, state, keep)
        loan.make_moved = partial(_fake_memory, device_type=device_type)
        loan.refuses_living = builds_model
        try:
            yield loan.job
        finally:
            loan.end()


@contextmanager
def borrowed_to_run(job: Job) -> Iterator[Job]:
    """Give a job whose steps can be run for real and leave everything as it was.

    Copies stand in for the tensors of models and optimizers that live already. On a GPU, where
    there may be no room for them, the originals' memory is used, and filled again from the host.
    What the job's functions build anew is taken as it is.

    Raises:
        HeldTensorError: if a tensor cannot be replaced.
    """
    # Held on to, so that no identity is given to another tensor.
    before = living(torch.Tensor, torch.optim.Optimizer)
    known = {id(each) for each in before}
    state = _state_of(job, [*_large(before)])
    copies = _Copies()
    with _put_back(state) as keep:
        loan = _Loan(job, StandIns(copies), lambda tensor: id(tensor) in known, state, keep)
        loan.keeps_others = True
        try:
            yield loan.job
        finally:
            loan.end()
            copies.put_back()
            before.clear()


@contextmanager
def code_left_alone(name: str, code: object) -> Iterator[None]:
    """Put back at the end what any code has bound anew while it was recorded."""
    begin = LiveState({name: code}, copies_content=False).snapshot()
    try:
        yield
    finally:
        begin.restore()


def _data_sets(job: Job) -> list[Any]:
    """List large tensors and arrays that only the batch function reaches."""
    functions = _functions_of(job)
    all_content = contents_of(LiveState(functions))
    del functions[BATCH]
    used = {id(each) for each in contents_of(LiveState(functions))}
    return [each for each in all_content if _is_large(each) and id(each) not in used]


def _is_large(content: Any) -> bool:
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size() > LARGE_BYTES
    return bool(content.nbytes > LARGE_BYTES)


def _functions_of(job: Job) -> dict[str, object]:
    return {
        "loss": job.loss,
        "model function": job.model,
        "optimizer function": job.optimizer,
        BATCH: job.batch,
    }


def _large(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Choose the tensors that usually get a stand-in, whose content is then kept by that."""
    for each in objects:
        if isinstance(each, torch.nn.Parameter):
            yield each
        elif issubclass(type(each), torch.optim.Optimizer) and "state" in vars(each):
            yield from (tensor for _, tensor in optimizer_tensors(each))


class _Loan:
    """Call a job's functions, with stand-ins for what lives in all that they return."""

    def __init__(
        self, job: Job, stand_ins: StandIns, lives: Lives, state: LiveState, keep: Keep
    ) -> None:
        self._job = job
        self._stand_ins = stand_ins
        self._lives = lives
        self._state = state
        self._keep = keep
        self._begins = ExitStack()
        self._has_run = False
        self._unwatched: list[torch.nn.Module] = []
        self._has_waiting = False
        self._others: list[tuple[torch.Tensor, Any]] = []
        self.keeps_others = False
        """Whether the content of parameters that get no stand-in has to be kept here."""
        self.make_moved: Maker | None = None
        """Makes what moves with the model."""
        self.refuses_living = False
        """Whether a model has to be built anew."""
        self.job = replace(job, model=self._model, optimizer=self._optimizer, loss=self._loss)

    def end(self) -> None:
        """Put everything back that lives."""
        self._stand_ins.put_back()
        self._begins.close()
        with torch.no_grad():
            for tensor, content in self._others:
                bytes_of(tensor).copy_(torch.from_numpy(content))
        self._others.clear()

    def _model(self) -> torch.nn.Module:
        made = self._job.model()
        if isinstance(made, torch.nn.Module):
            self._check_not_sharded(made)
            self._check_anew(made)
            self._watch(made, "model", module_tensors(made))
            self._replace(made.named_parameters(), make=self.make_moved)
            self._replace(made.named_buffers(), may_go=True, make=self.make_moved)
            self._replace(module_tensors(made), may_go=True)
            self._unwatched.append(made)
        self._keep(made)
        return made

    def _check_not_sharded(self, model: torch.nn.Module) -> None:
        """Refuse a living model of FSDP2, which frees and fills memory by tensors of its own.

        Raises:
            HeldTensorError: if it is one.
        """
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return
        for prefix, module in model.named_modules():
            if not isinstance(module, fsdp.FSDPModule):
                continue
            for name, parameter in module.named_parameters(prefix):
                if self._lives(parameter):
                    raise HeldTensorError(name, "fully_shard() keeps other tensors over its memory")

    def _check_anew(self, model: torch.nn.Module) -> None:
        """Refuse a living model where ranks are to share it, which changes it for good.

        Raises:
            HeldTensorError: if it is one.
        """
        living = (name for name, each in model.named_parameters() if self._lives(each))
        if self.refuses_living and (name := next(living, None)) is not None:
            reason = "ranks share a model for good; have the job's model function build it anew"
            raise HeldTensorError(name, reason)

    def _optimizer(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> torch.optim.Optimizer:
        made = build_optimizer(self._job, named_parameters)
        if isinstance(made, torch.optim.Optimizer):
            self._watch(made, "optimizer", optimizer_tensors(made))
            states = [each for each in optimizer_tensors(made) if each[1].dim()]
            self._replace(states, make=self.make_moved)
            self._replace(optimizer_tensors(made))
        self._keep(made)
        self._stand_ins.settle()
        if self.keeps_others:
            self._keep_others()
        return made

    def _loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor | Total:
        if self._has_waiting:
            self._let_go()
        if not self._has_run:
            self._has_run = True
            self._keep(batch)
        value = self._job.loss(model, batch)
        if self._unwatched:
            self._let_go()
        return value

    def _let_go(self) -> None:
        """Put back early what forwards have bound anew; a stand-in would keep the old memory.

        What a strategy still holds, to run a forward again, waits for the next one.
        """
        used = (tensor for made in self._unwatched for _, tensor in module_tensors(made))
        gone = self._stand_ins.gone(used)
        held = tensors_held() if gone else frozenset[int]()
        self._stand_ins.put_back_early(each for each in gone if id(each) not in held)
        self._has_waiting = any(id(each) in held for each in gone)
        if not self._has_waiting:
            self._unwatched.clear()

    def _watch(self, made: object, name: str, tensors: NamedTensors) -> None:
        """Keep what lives and cannot be reached from the job's functions."""
        living = [tensor for _, tensor in tensors if self._lives(tensor)]
        if living and not reaches(self._state, made):
            state = LiveState(
                {name: made},
                leave_out=living,
                most_bytes=sys.maxsize,
                copies_content=self.keeps_others,
            )
            self._begins.callback(state.snapshot().restore)

    def _replace(
        self, tensors: NamedTensors, *, may_go: bool = False, make: Maker | None = None
    ) -> None:
        living = [(each, tensor) for each, tensor in tensors if self._lives(tensor)]
        self._stand_ins.take_places(living, may_go=may_go, make=make)

    def _keep_others(self) -> None:
        """Copy what was left out and is no stand-in now, outside of torch's allocator."""
        self._others = [
            (tensor, bytes_of(tensor).cpu().numpy().copy())
            for tensor in tensors_of(self._state, left_out=True)
            if has_content(tensor) and not self._stand_ins.has(tensor)
        ]


class _Copies:
    """Copy memory, or, on a GPU, lend it and fill it again at the end."""

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.device.type == CPU:
            return flat.clone()
        self._lent.append((flat, flat.cpu()))
        return flat

    def put_back(self) -> None:
        """Fill the memory that was lent."""
        with torch.no_grad():
            for flat, before in self._lent:
                flat.copy_(before)
        self._lent.clear()


def _fake_memory(flat: torch.Tensor, device_type: str = CPU) -> torch.Tensor:
    if isinstance(flat, FakeTensor):
        return flat
    device = flat.device if device_type == CPU else torch.device(device_type)
    return torch.empty(flat.shape, dtype=flat.dtype, device=device)
