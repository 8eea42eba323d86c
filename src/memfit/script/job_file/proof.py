"""Compares a job that was written with the script that it was written from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map

from memfit.job import Job, Total, build_optimizer
from memfit.script.drawn_batches import DrawnBatches, plain_batch
from memfit.script.job_file.first_step import FirstStep, RandomStates
from memfit.script.job_file.text import Cut

_MOST_RELATIVE = 1e-5
"""Of the loss in fp32: the same operators on the same numbers, so that only rounding is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The loss of the job and of the script, of the same batch, weights and random states."""

    script: float
    job: float

    @property
    def relative_error(self) -> float:
        """Return how far the two are apart."""
        return abs(self.job - self.script) / max(abs(self.script), 1e-12)

    @property
    def are_equal(self) -> bool:
        """Return whether they are equal up to rounding."""
        return self.relative_error <= _MOST_RELATIVE


class OtherThanScriptError(Exception):
    """Say in what a job differs from its script."""


def load_text(text: str, output: Path, script_folder: Path) -> ModuleType:
    """Run the text of a job file as a module of its own."""
    module = ModuleType(f"memfit_job_{output.stem}")
    module.__file__ = str(output)
    sys.modules[module.__name__] = module
    path = [str(output.parent), str(script_folder), *sys.path]
    with patch.object(sys, "path", path):
        exec(compile(text, str(output), "exec"), vars(module))  # noqa: S102 - the user's own code
    return module


def compare(
    module: ModuleType, cut: Cut, first: FirstStep, live: torch.nn.Module, batch: Any
) -> Losses:
    """Compute the job's loss where the script's first iteration began.

    Args:
        module: the job file, loaded.
        cut: what it was made of.
        first: how the script stood, and what its loss was.
        live: the script's model.
        batch: of its first iteration, from ``first_batch``.

    Raises:
        OtherThanScriptError: if the model, the optimizer or the loss is another.
    """
    job: Job = module.job
    start = first.start
    assert start is not None, "the loop has been seen"
    model = job.model()
    _compare_models(model, live)
    _compare_optimizers(job, model, first)
    prefix = f"{cut.seen.model}."
    own = {
        name.removeprefix(prefix): value
        for name, value in start.weights.items()
        if name.startswith(prefix)
    }
    model.load_state_dict(own)
    for name, each in model.named_modules():
        each.training = start.training[f"{cut.seen.model}.{name}".rstrip(".")]
    start.random_states.restore()
    loss = _value(job.loss(model, batch))
    found = Losses(script=first.losses[0] * cut.seen.num_backwards, job=loss)
    if not found.are_equal:
        msg = f"its loss of the first batch is {loss:.8g}, the script's {found.script:.8g}"
        raise OtherThanScriptError(msg)
    return found


def compare_window(module: ModuleType, cut: Cut) -> None:
    """Compare the mean over the parts of one update with the loss of all of its samples at once.

    Without gradients and in evaluation mode, so that nothing is drawn.

    Raises:
        OtherThanScriptError: if they differ.
    """
    num = cut.seen.num_backwards
    if num == 1:
        return
    job: Job = module.job
    drawn: DrawnBatches = module.drawn
    size = cut.seen.micro_batch_size
    model = job.model().eval()
    whole = drawn.of_size(num * size)
    with torch.no_grad():
        parts = [
            _value(job.loss(model, _rows(whole, number * size, size, num * size)))
            for number in range(num)
        ]
        found = Losses(script=sum(parts) / num, job=_value(job.loss(model, whole)))
    if not found.are_equal:
        msg = (
            f"the mean over the {num} parts of an update is {found.script:.8g}, and over all of "
            f"their samples together {found.job:.8g}: the parts weigh differently than samples"
        )
        raise OtherThanScriptError(msg)


def _rows(batch: Any, start: int, num_rows: int, whole: int) -> Any:
    return tree_map(
        lambda leaf: (
            leaf[start : start + num_rows]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == whole
            else leaf
        ),
        batch,
    )


def first_batch(module: ModuleType, cut: Cut, first: FirstStep) -> Any:
    """Return the batch of the script's first iteration, or fetch it as the script would next."""
    assert first.start is not None, "the loop has been seen"
    names = first.start.names
    if not set(cut.loss.batch_names) <= set(names) or (
        cut.loss.header is None and not _carried(cut)
    ):
        first.start.random_states.restore()
        batch = next(iter(module.batches()))
        first.start.random_states = RandomStates()  # the fetch has drawn its part
        return batch
    values = [names[name] for name in cut.loss.batch_names]
    return plain_batch(values[0] if len(values) == 1 else tuple(values))


def _carried(cut: Cut) -> bool:
    """Return whether the batch is fetched for the next iteration, so that this one has its own."""
    return (
        bool(cut.loss.fetch)
        and cut.loss.fetch[0].lineno > cut.loop.loop.lineno
        and (cut.loss.fetch[0].lineno > min(each.lineno for each in cut.loss.statements))
    )


def _value(loss: torch.Tensor | Total) -> float:
    if isinstance(loss, Total):
        return float(loss.sum) / float(loss.count)
    return float(loss.detach())


def _compare_models(made: torch.nn.Module, live: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        own = {name: _facts(each) for name, each in getattr(made, kind)()}
        other = {name: _facts(each) for name, each in getattr(live, kind)()}
        if own != other:
            name = min(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
            msg = (
                f"the model that it builds differs in {name}: {own.get(name, 'absent')} there, "
                f"{other.get(name, 'absent')} in the script"
            )
            raise OtherThanScriptError(msg)


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _compare_optimizers(job: Job, model: torch.nn.Module, first: FirstStep) -> None:
    made = build_optimizer(job, model.named_parameters())
    script = first.updated[0]
    sizes = [[p.numel() for p in group["params"]] for group in made.param_groups]
    expected = [[p.numel() for p in group["params"]] for group in script.param_groups]
    if type(made).__name__ != type(script).__name__ or [*map(sorted, sizes)] != [
        *map(sorted, expected)
    ]:
        raise OtherThanScriptError("the optimizer that it builds has other groups")
