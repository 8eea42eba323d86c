"""How each source runs a step: where the batch is made, what stays bound, when the peak is reset.

Names that stay bound keep tensors alive, so each kind of step is written out with the lifetimes
that the authors' program has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .attention import attended
from .losses import Batch, Loss
from .optimizers import Scaler, build_optimizer
from .packages import CannotRebuild
from .rows import Row

Step = Callable[[], None]
Watch = Callable[[str], None]
"""Is told the name of each phase of a step at its end."""
_KEPT = re.compile(r"\b(?:output|out|outputs|logits)\b.*\b(?:alive|lives?|stays?|kept|bound)\b")
_NOT_KEPT = re.compile(r"\bnot\b.{0,20}\bkept\b|\bnot\b.{0,20}\balive\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What distinguishes one source's step from another's."""

    name: str
    keeps_output: bool
    """Whether the step's function has a name for what the model returned."""
    binds_until_next_step: bool = False
    """Whether names are overwritten by the next step, instead of dropped at the end of this one."""
    copies_batch_each_step: bool = False
    zero_grad: str = "start"
    """``start``, ``before_backward``, ``end`` or ``never``."""
    sets_to_none: bool = True
    resets_peak: bool = True
    """Whether peaks are reset before the measured steps."""
    has_context_probe: bool = False
    """Whether the process multiplied and convolved small tensors before anything else."""


def protocol_of(row: Row) -> Protocol:
    """Return the protocol of a row's source; of an unknown source, what its fields say."""
    position, sets_to_none = _zero_grad(row.zero_grad)
    source = row.source.lower()
    if source == "xmem":
        return Protocol(
            name="xmem",
            keeps_output=True,
            binds_until_next_step=True,
            copies_batch_each_step=True,
            zero_grad=position,
            sets_to_none=sets_to_none,
            resets_peak=False,
        )
    return Protocol(
        name=source if source in {"torch-preflight", "fitcheck"} else "default",
        keeps_output=source == "fitcheck" or _keeps_output(row),
        zero_grad=position,
        sets_to_none=sets_to_none,
        resets_peak=row.num_warmup_steps > 0,
        has_context_probe=source == "torch-preflight",
    )


def _zero_grad(text: str | None) -> tuple[str, bool]:
    """Read where gradients are dropped, and whether they become None."""
    words = (text or "start").lower().replace("_", " ")
    sets_to_none = "none=false" not in words.replace(" ", "").replace("settonone", "none")
    for position, signs in (
        ("never", ("never", "not called", "no zero")),
        ("before_backward", ("before backward", "before loss.backward", "before the backward")),
        ("end", ("end", "after")),
    ):
        if any(sign in words.split("(")[0] for sign in signs):
            return position, sets_to_none
    return "start", sets_to_none


def _keeps_output(row: Row) -> bool:
    """Test whether the step has a name for the model's output; of transformers models, usually."""
    notes = " ".join(row.notes).lower()
    if _NOT_KEPT.search(notes):
        return False
    return row.model_library == "transformers" or bool(_KEPT.search(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step works with, on its device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    loss: Loss
    device: str


def make_step(row: Row, protocol: Protocol, parts: Parts) -> Step:
    """Return the function that runs one step as the protocol says."""
    return attended(row, parts.device, write_step(row, protocol, parts))


def _unwatched(_phase: str) -> None:
    """Take no notice of a phase."""


def write_step(row: Row, protocol: Protocol, parts: Parts, watch: Watch = _unwatched) -> Step:
    """Write one step as it is, with torch's own choice of attention kernels and masks."""
    if protocol.binds_until_next_step:
        return _step_until_next(row, protocol, parts)
    if row.constructor.get("turns"):
        return _step_of_turns(row, protocol, parts, watch)
    return _step_in_function(row, protocol, parts, watch)


def _step_in_function(row: Row, protocol: Protocol, parts: Parts, watch: Watch) -> Step:
    """Write a step whose names are dropped when its function returns."""
    model, optimizer, batch, loss_of = parts.model, parts.optimizer, parts.batch, parts.loss
    precision = partial(autocast, row, parts.device)
    scaler = Scaler(parts.device) if row.precision_detail.get("grad_scaler") is True else None
    go_backward = torch.Tensor.backward if scaler is None else scaler.backward
    update = optimizer.step if scaler is None else partial(scaler.step, optimizer)
    drop = partial(optimizer.zero_grad, set_to_none=protocol.sets_to_none)
    num_batches = row.accumulation_steps

    def step() -> None:
        if protocol.zero_grad == "start":
            drop()
        for _ in range(num_batches):
            with precision():
                loss, output = loss_of(model, batch)
            if not protocol.keeps_output:
                del output
            watch("forward")
            if protocol.zero_grad == "before_backward":
                drop()
            go_backward(loss if num_batches == 1 else loss / num_batches)
            watch("backward")
        update()
        watch("optimizer")
        if protocol.zero_grad == "end":
            drop()

    return step


def _step_of_turns(row: Row, protocol: Protocol, parts: Parts, watch: Watch) -> Step:
    """Write a step in which parts of the model take turns, each with an optimizer of its own."""
    model, batch, loss_of = parts.model, parts.batch, parts.loss
    precision = partial(autocast, row, parts.device)
    optimizers = {
        turn: build_optimizer(row, getattr(model, turn), parts.device)
        for turn in row.constructor["turns"]
    }

    def step() -> None:
        for turn, optimizer in optimizers.items():
            optimizer.zero_grad(set_to_none=protocol.sets_to_none)
            with precision():
                loss, output = loss_of(partial(model, turn), batch)  # type: ignore[arg-type]
            del output
            watch("forward")
            loss.backward()
            watch("backward")
            optimizer.step()
            watch("optimizer")

    return step


def _step_until_next(row: Row, protocol: Protocol, parts: Parts) -> Step:
    """Write a step of a loop in one function, where each name lives until it is bound again."""
    model, optimizer = parts.model, parts.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    precision = partial(autocast, row, parts.device)
    drop = partial(optimizer.zero_grad, set_to_none=protocol.sets_to_none)
    bound = SimpleNamespace(batch=None, outputs=None, loss=None, largest=None)

    def step() -> None:
        bound.batch = dict(parts.batch)  # the loop's next batch takes the place of the last one
        if protocol.zero_grad == "start":
            drop()
        bound.batch = {name: each.to(parts.device) for name, each in bound.batch.items()}
        with precision():
            bound.loss, bound.outputs = _overwriting(bound, model, parts.loss)
        if protocol.zero_grad == "before_backward":
            drop()
        bound.loss.backward()
        optimizer.step()
        if isinstance(bound.outputs, torch.Tensor):
            bound.largest = torch.max(bound.outputs, 1)
        scheduler.step()
        if protocol.zero_grad == "end":
            drop()

    return step


def _overwriting(
    bound: SimpleNamespace, model: nn.Module, loss_of: Loss
) -> tuple[torch.Tensor, Any]:
    """Run the model and the loss; the last outputs are dropped as soon as there are new ones."""

    def run(*args: Any, **kwargs: Any) -> Any:
        bound.outputs = model(*args, **kwargs)
        return bound.outputs

    return loss_of(run, bound.batch)  # type: ignore[arg-type]


def probe_context(device: str) -> None:
    """Multiply two small matrices and run a small convolution both ways; then free what is free.

    What the libraries keep for themselves, such as the workspaces of cuBLAS, stays.
    """
    values = torch.randn(256, 256, device=device)
    (values @ values).sum()
    convolution = nn.Conv2d(3, 16, 3, padding=1).to(device)
    convolution(torch.randn(1, 3, 64, 64, device=device)).sum().backward()
    del values, convolution
    torch.cuda.empty_cache()


def autocast(row: Row, device: str) -> AbstractContextManager[Any]:
    """Return the context of the forward pass: autocast for mixed precision, else nothing."""
    if row.precision != "amp":
        return nullcontext()
    name = str(row.precision_detail.get("autocast_dtype") or "float16").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRebuild(f"autocast has the dtype {name!r}, which torch lacks")
    # A virtual card is not there for torch, which would switch autocast off.
    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_args, **_kwargs: True),
    ):
        return torch.autocast(torch.device(device).type, dtype=dtype)
