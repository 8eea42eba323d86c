"""Finds what a job holds between steps: parameters, buffers, and Python attributes."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEEPEST = 40
_SOURCES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(slots=True)
class State:
    """Copies of what was found, by path; and the generators that belong to the job."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: list[Any] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)
    """The paths of the parameters that an optimizer moves."""
    seen: set[int] = field(default_factory=set)


def state_of(model: nn.Module, loss: Any, batch: Any) -> State:
    """Copy what can be reached from a model, a loss and a batch: tensors, numbers and words.

    Limits: what lies behind module globals, and in objects with slots, is not found.
    """
    found = State()
    _walk("model", model, found, 0)
    _walk("loss", loss, found, 0)
    _walk("batch", batch, found, 0)
    return found


def _walk(path: str, value: Any, found: State, depth: int) -> None:
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        found.values[path] = value
        return
    if depth > _DEEPEST or id(value) in found.seen:
        return
    found.seen.add(id(value))
    if isinstance(value, Tensor):
        found.values[path] = value.detach().clone()
        if isinstance(value, nn.Parameter) and value.requires_grad:
            found.trained.add(path)
    elif isinstance(value, np.ndarray):
        found.values[path] = torch.from_numpy(value.copy())
    elif isinstance(value, _SOURCES):
        found.sources.append(value)
    else:
        for name, part in _parts(value):
            _walk(f"{path}.{name}", part, found, depth + 1)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return _of_dict(value)
    if isinstance(value, (list, tuple, deque)):
        return ((str(index), each) for index, each in enumerate(value))
    if isinstance(value, types.MethodType):
        return (("self", value.__self__),)
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if isinstance(value, (type, types.ModuleType, torch.dtype, torch.device)):
        return ()
    return _of_dict(vars(value)) if hasattr(value, "__dict__") else ()


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _of_dict(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a dict's entries; hooks lie under numbers that differ from process to process."""
    for index, (key, each) in enumerate(list(value.items())):
        yield key if isinstance(key, str) else f"#{index}", each


def difference(one: State, other: State) -> tuple[float, float]:
    """Return the largest relative difference in trained parameters, and in all else.

    Something that only one of them has, or of another shape or kind, differs by infinity.
    """
    largest = [0.0, 0.0]
    for path in one.values.keys() | other.values.keys():
        if path in one.values and path in other.values:
            error = _error(one.values[path], other.values[path])
        else:
            error = float("inf")
        index = 0 if path in one.trained else 1
        largest[index] = max(largest[index], error)
    return largest[0], largest[1]


def _error(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        if not one.numel():
            return 0.0
        a, b = one.to(torch.float64), other.to(torch.float64)
        gap = torch.nan_to_num(a - b, nan=0.0).abs().max()
        return float(gap / a.abs().nan_to_num().max().clamp_min(1e-12))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(abs(one), 1e-12)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float("inf")
    return 0.0 if one == other else float("inf")
