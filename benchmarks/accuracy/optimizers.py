"""Optimizers of rows: those of torch as they are, 8-bit Adam by the tensors that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .packages import CannotRebuild
from .rows import Row

_EIGHT_BIT_ADAMS = {"Adam8bit": "Adam", "AdamW8bit": "AdamW"}
_LOOPS_BY_DEFAULT = {"Adafactor"}
_BLOCK_VALUES = 256
_TABLE_VALUES = 256
_SMALLEST_EIGHT_BIT = 4096


def build_optimizer(row: Row, model: nn.Module, device: str) -> torch.optim.Optimizer:
    """Build the optimizer of a row over the parameters that are trained.

    On a CUDA device torch updates all parameters at once unless told otherwise. It tells real
    parameters by their type, so that the choice is written out here for fake ones.

    Raises:
        CannotRebuild: if there is no such optimizer, or it refuses its arguments.
    """
    library, _, name = row.optimizer.rpartition(".")
    parameters = [each for each in model.parameters() if each.requires_grad]
    kwargs = dict(row.optimizer_kwargs)
    if isinstance(kwargs.get("betas"), list):
        kwargs["betas"] = tuple(kwargs["betas"])
    if library.split(".")[0] in {"bitsandbytes", "bnb"} or name in _EIGHT_BIT_ADAMS:
        if name not in _EIGHT_BIT_ADAMS:
            raise CannotRebuild(f"the optimizer {row.optimizer} keeps states that are not known")
        return EightBitAdam(parameters, lr=kwargs.get("lr", 1e-3))
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type):
        raise CannotRebuild(f"torch.optim has no {name!r}")
    choices = inspect.signature(kind).parameters
    asked = kwargs.get("fused") or kwargs.get("foreach") is not None
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and "foreach" in choices and not asked and name not in _LOOPS_BY_DEFAULT:
        kwargs["foreach"] = True
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **kwargs)
    except (TypeError, ValueError) as error:
        raise CannotRebuild(f"{name} refuses its arguments ({error})") from error
    return optimizer


class EightBitAdam(torch.optim.Optimizer):
    """Keep the states of bitsandbytes' 8-bit Adam, without updating anything.

    Per parameter two bytes per value and two scales per 256 values; two tables per optimizer; small
    parameters keep fp32 states. Source: bitsandbytes 0.50.2, optim/optimizer.py (read 2026-11-21).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the states at the first step."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._states(parameter)

    def _states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        is_small = parameter.numel() < _SMALLEST_EIGHT_BIT
        dtype = torch.float32 if is_small else torch.uint8
        states = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
        if not is_small:
            device = parameter.device
            if device not in self._tables:
                table = torch.zeros(_TABLE_VALUES, device=device)
                self._tables[device] = table, torch.zeros_like(table)
            num_blocks = -(parameter.numel() // -_BLOCK_VALUES)
            for name in ("absmax1", "absmax2"):
                states[name] = torch.zeros(num_blocks, dtype=torch.float32, device=device)
        return states


class Scaler:
    """Scale the loss and unscale the gradients as a gradient scaler does, without looking at them.

    The real one asks the card whether a gradient overflowed; that takes no memory.
    """

    def __init__(self, device: str) -> None:
        self._scale = torch.full((), 65536.0, dtype=torch.float32, device=device)
        self._growth = torch.full((), 0, dtype=torch.int32, device=device)

    def backward(self, loss: torch.Tensor) -> None:
        """Go backward from the scaled loss."""
        (loss * self._scale).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients in place, and update."""
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        inverse = self._scale.double().reciprocal().float()
        overflow = torch.full((), 0.0, dtype=torch.float32, device=self._scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        optimizer.step()
