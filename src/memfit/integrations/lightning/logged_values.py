"""What a batch logs, kept until the batch is done, and logged once for the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.integrations.lightning.framework import inside_hook
from memfit.integrations.lightning.metrics import Metrics


@dataclass(slots=True)
class _Logged:
    """One value of one hook, as the forwards of a batch logged it."""

    hook: str
    name: str
    settings: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class LoggedValues:
    """Stand in for ``self.log`` while a batch is run, perhaps in pieces, perhaps several times.

    A value of a piece counts by its samples, or by ``batch_size`` where that is given: what is
    logged is the mean over the batch. What was computed by a metric is its value for the batch.

    Args:
        module: whose ``log`` is replaced.
        metrics: of that module.
    """

    def __init__(self, module: Any, metrics: Metrics) -> None:
        self._module = module
        self._metrics = metrics
        self._kept: dict[tuple[str, str, int], _Logged] = {}
        self._piece: list[tuple[str, str, Any, dict[str, Any]]] | None = None
        self._depth = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect what is logged; what was collected before is dropped."""
        if not self._depth:
            self._kept = {}
            vars(self._module)["log"] = self._log
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                del vars(self._module)["log"]

    def begin_batch(self) -> None:
        """Forget a batch of the same window that was run again: it has been logged."""
        self._kept = {}

    @contextmanager
    def piece(self, num_samples: int, terms: Any = None) -> Iterator[None]:
        """Collect what a forward logs; one that fails, or has no gradients, does not count.

        Args:
            num_samples: in the piece.
            terms: how many terms its loss is a mean of; None where that is the samples.
        """
        before, self._piece = self._piece, []
        try:
            yield
            if torch.is_grad_enabled() and self._metrics.counts:
                self._take(self._piece, num_samples, terms)
        finally:
            self._piece = before

    def _take(
        self, logged: Sequence[tuple[str, str, Any, dict[str, Any]]], samples: int, terms: Any
    ) -> None:
        counts: dict[tuple[str, str], int] = {}
        for hook, name, value, settings in logged:
            number = counts[hook, name] = counts.get((hook, name), -1) + 1
            size = settings.get("batch_size")
            own = _Logged(hook, name, settings)
            kept = self._kept.setdefault((hook, name, number), own)
            kept.values.append(value)
            kept.sizes.append(samples if size is None else size)
            kept.weights.append(kept.sizes[-1] if terms is None else terms)

    def flush(self) -> None:
        """Log what was collected."""
        kept, self._kept = self._kept, {}
        for each in kept.values():
            settings = dict(each.settings)
            if settings.get("batch_size") is not None and len(each.weights) > 1:
                settings["batch_size"] = sum(each.sizes)
            value = self._metrics.of_batch(each.values[-1])
            if value is None:
                value = _joined(each.values, each.weights, settings.get("reduce_fx", "mean"))
            with inside_hook(self._module, each.hook):
                self._module.log(each.name, value, **settings)

    def _log(self, name: str, value: Any, *args: Any, **settings: Any) -> None:
        if self._piece is None and _is_in_backward():
            return  # a forward that is run again has been logged
        settings.update(zip(_POSITIONAL, args, strict=False))
        hook = self._module._current_fx_name
        if isinstance(value, torch.Tensor):
            value = self._metrics.noted(value, value.detach().clone())
        if self._piece is not None:
            self._piece.append((hook, name, value, settings))
        else:
            self._take([(hook, name, value, settings)], 1, None)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_REDUCTIONS: dict[str, Any] = {"sum": sum, "min": min, "max": max}
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph")
"""The arguments of ``LightningModule.log`` behind name and value, in their order."""


def _joined(values: Sequence[Any], weights: Sequence[Any], reduction: Any) -> Any:
    """Join what pieces have logged as steps are joined over an epoch: a mean, a sum, an extreme.

    A single value, and equal numbers of a mean, stay as they are.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([each[key] for each in values], weights, reduction) for key in first}
    if len(values) == 1 or not isinstance(first, (int, float, torch.Tensor)):
        return values[-1]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name.lower() in _REDUCTIONS:
        return _REDUCTIONS[name.lower()](values)
    if not isinstance(first, torch.Tensor) and all(each == first for each in values):
        return first
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
