"""Describes an optimizer as it was made, so that its making can be written down."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.script.job_file.facts import OptimizerGroup, SeenOptimizer

_PLAIN = (bool, int, float, str, type(None))
_CONDITIONS = (
    "p.requires_grad",
    "p.ndim >= 2",
    "p.ndim < 2",
    "p.requires_grad and p.ndim >= 2",
    "p.requires_grad and p.ndim < 2",
    "name.endswith('bias')",
    "not name.endswith('bias')",
)


class NotDescribedError(Exception):
    """Say why an optimizer cannot be written down."""


def describe_optimizer(
    optimizer: torch.optim.Optimizer,
    made_with: Sequence[Mapping[str, Any]],
    model: torch.nn.Module,
) -> SeenOptimizer:
    """Describe an optimizer by its class, its settings, and the names of its parameters.

    Args:
        optimizer: which is described.
        made_with: its groups as they were when it was made, before a scheduler changed them.
        model: whose names its parameters have.

    Raises:
        NotDescribedError: if it holds parameters of nothing in the model, or settings that
            cannot be written down.
    """
    if len(made_with) != len(optimizer.param_groups):
        raise NotDescribedError("groups were added to the optimizer after it was made")
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    accepted = set(inspect.signature(type(optimizer).__init__).parameters)
    groups = []
    for group in made_with:
        names = [own.get(id(parameter), "") for parameter in group["params"]]
        if "" in names:
            raise NotDescribedError("the optimizer holds parameters from outside the model")
        settings = {key: value for key, value in group.items() if key in accepted - {"params"}}
        unplain = [key for key, value in settings.items() if not _is_plain(value)]
        if unplain:
            raise NotDescribedError(f"its setting {unplain[0]} is no plain value")
        condition = _condition(set(names), model)
        groups.append(OptimizerGroup(names=names, condition=condition, settings=settings))
    kind = type(optimizer)
    return SeenOptimizer(module=kind.__module__, name=kind.__qualname__, groups=groups)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


def _condition(names: set[str], model: torch.nn.Module) -> str:
    """Return an expression that chooses these parameters: a rule, else their names."""
    everything = dict(model.named_parameters())
    if names == set(everything):
        return ""
    for condition in _CONDITIONS:
        if names == _chosen(condition, everything):
            return condition
    others = set(everything) - names
    if len(others) < len(names):
        return f"name not in {_set_text(others)}"
    return f"name in {_set_text(names)}"


def _set_text(names: set[str]) -> str:
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"


def _chosen(condition: str, parameters: Mapping[str, torch.nn.Parameter]) -> set[str]:
    rule = eval(f"lambda name, p: {condition}")  # noqa: S307 - one of the conditions above
    return {name for name, parameter in parameters.items() if rule(name, parameter)}
