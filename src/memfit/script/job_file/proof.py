"""Compares a job that was written with the script that it was written from."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from memfit.job import Job, Total, build_optimizer
from memfit.script.drawn_batches import place_of, plain_batch
from memfit.script.job_file.first_step import FirstStep, RandomStates
from memfit.script.job_file.text import Cut
from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness

_MOST_RELATIVE = 1e-5
"""Of the loss in fp32: the same operators on the same numbers, so that only rounding is left."""
_MOST_WINDOWS = 8
"""Updates that are looked through for parts of different lengths."""


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

    Without gradients, in evaluation mode, and with draws that do not depend on the grouping. Among
    the first updates one is taken whose parts differ in length, where there is one.

    Raises:
        OtherThanScriptError: if they differ.
    """
    num = cut.seen.num_backwards
    if num == 1:
        return
    job: Job = module.job
    parts = _window(module, num)
    model = job.model().eval()
    whole = module.drawn.joined(parts)
    with untouched_randomness(), DeterministicDraws(), torch.no_grad():
        means = [_value(job.loss(model, part)) for part in parts]
        found = Losses(script=sum(means) / num, job=_value(job.loss(model, whole)))
    if not found.are_equal:
        msg = (
            f"the mean over the {num} parts of an update is {found.script:.8g}, and over all of "
            f"their samples together {found.job:.8g}: the parts weigh differently than samples"
        )
        raise OtherThanScriptError(msg)


def _window(module: ModuleType, num_parts: int) -> list[Any]:
    """Return the script's batches of one update, of different lengths if there are such."""
    drawn = [plain_batch(each) for each in islice(module.batches(), _MOST_WINDOWS * num_parts)]
    windows = [drawn[i : i + num_parts] for i in range(0, len(drawn), num_parts)]
    whole = [window for window in windows if len(window) == num_parts]
    return next((each for each in whole if len({*map(_lengths, each)}) > 1), whole[0])


def _lengths(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape[1:]) for leaf in _tensors(batch))


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]


def padding_of(batches: Iterable[Any]) -> dict[str | int, float]:
    """Find what batches are filled up with whose lengths differ, by keys or places of tensors.

    That is the number with which most rows end that end with one number twice. Whether the loss is
    indifferent to it is for ``compare_window`` to say.

    Args:
        batches: some of the script's.
    """
    seen: dict[str | int, list[torch.Tensor]] = {}
    for batch in map(plain_batch, batches):
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
                seen.setdefault(place_of(path), []).append(leaf)
    found: dict[str | int, float] = {}
    for place, tensors in seen.items():
        if len({tuple(tensor.shape[1:]) for tensor in tensors}) > 1:
            ends = [row for each in tensors for row in each.flatten(0, -2)[:, -2:].tolist()]
            twice = Counter(row[0] for row in ends if len(row) > 1 and row[0] == row[1])
            found[place] = twice.most_common(1)[0][0] if twice else 0
    return found


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
    return _batch_of(names, cut)


def parts_of_first_update(cut: Cut, first: FirstStep, batch: Any) -> list[Any]:
    """Return the batches that the script's first update has seen, one for each backward.

    Where statements fetch them, the first one stands for all.

    Args:
        cut: what the job file was made of.
        first: how the script stood at each of its iterations.
        batch: of the first iteration.
    """
    num = cut.seen.num_backwards
    names = set(cut.loss.batch_names)
    begins = first.iterations[:num]
    if cut.loss.header is None or len(begins) < num or not all(names <= {*b} for b in begins):
        return [batch] * num
    return [batch, *(_batch_of(each, cut) for each in begins[1:])]


def _batch_of(names: Mapping[str, Any], cut: Cut) -> Any:
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
