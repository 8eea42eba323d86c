"""What a batch logs, kept until the batch is done, and logged once for the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.integrations.lightning.framework import inside_hook, log_replaced
from memfit.integrations.lightning.joins import Found, Key, KnownJoins, Pieces, default_join
from memfit.integrations.lightning.metrics import Metrics


@dataclass(slots=True)
class _Logged:
    """One value of one hook, as the forwards of a batch logged it."""

    settings: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    counts: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def pieces(self) -> Pieces:
        """Return the value of each piece."""
        return Pieces(self.values, self.counts)


class LoggedValues:
    """Stand in for ``self.log`` while a batch is run, perhaps in pieces, perhaps several times.

    What is logged is the value of the batch: what pieces logged is put together as ``joins`` knows
    by trial, else as a mean. What was computed by a metric is its value for the batch.

    Args:
        module: whose ``log`` is replaced.
        metrics: of that module.
    """

    def __init__(self, module: Any, metrics: Metrics) -> None:
        self._module = module
        self._metrics = metrics
        self._kept: dict[Key, _Logged] = {}
        self._piece: list[_Call] | None = None
        self._tried: list[dict[Key, _Logged]] | None = None
        self._depth = 0
        self.joins = KnownJoins()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect what is logged; what was collected before is dropped."""
        if not self._depth:
            self._kept = {}
        self._depth += 1
        try:
            with log_replaced(self._module, self._log) if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def trying(self) -> Iterator[list[dict[Key, _Logged]]]:
        """Give what each forward inside logs, and keep what a batch has logged."""
        kept, self._tried = self._kept, []
        try:
            with self.collecting():
                yield self._tried
        finally:
            self._kept, self._tried = kept, None

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
            if self._tried is not None:
                self._tried.append({})
                _take(self._tried[-1], self._piece, num_samples, terms)
            elif torch.is_grad_enabled() and self._metrics.counts:
                _take(self._kept, self._piece, num_samples, terms)
        finally:
            self._piece = before

    def is_to_be_tried(self) -> bool:
        """Return whether it is still open how pieces of this batch are put together."""
        return any(
            len(each.values) > 1
            and not self.joins.of(key).is_settled
            and isinstance(each.values[0], _NUMBERS)
            and self._metrics.of_batch(each.values[-1]) is None
            for key, each in self._kept.items()
        )

    def flush(self) -> None:
        """Log what was collected."""
        kept, self._kept = self._kept, {}
        for key, each in kept.items():
            hook, name, _ = key
            settings = dict(each.settings)
            found = self.joins.of(key) if len(each.values) > 1 else None
            if settings.get("batch_size") is not None and found is not None and found.sizes_add_up:
                settings["batch_size"] = sum(each.counts["sizes"])
            value = self._metrics.of_batch(each.values[-1])
            if value is None:
                value = _joined(each, found)
            with inside_hook(self._module, hook):
                self._module.log(name, value, **settings)

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
            _take(self._kept, [(hook, name, value, settings)], 1, None)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_Call = tuple[str, str, Any, dict[str, Any]]
_NUMBERS = (int, float, torch.Tensor)
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph")
"""The arguments of ``LightningModule.log`` behind name and value, in their order."""


def _take(kept: dict[Key, _Logged], logged: Sequence[_Call], samples: int, terms: Any) -> None:
    """Add what one forward logged."""
    numbers: dict[tuple[str, str], int] = {}
    for hook, name, value, settings in logged:
        number = numbers[hook, name] = numbers.get((hook, name), -1) + 1
        each = kept.setdefault((hook, name, number), _Logged(settings))
        each.values.append(value)
        size = settings.get("batch_size")
        for by, count in (("samples", samples), ("terms", terms), ("sizes", size)):
            if count is not None:
                each.counts.setdefault(by, []).append(count)


def _joined(logged: _Logged, found: Found | None) -> Any:
    """Put together what pieces have logged."""
    first = logged.values[0]
    if isinstance(first, dict):
        parts = {key: [each[key] for each in logged.values] for key in first}
        return {
            key: _joined(_Logged(logged.settings, values, logged.counts), found)
            for key, values in parts.items()
        }
    if found is None or len(logged.values) == 1 or not isinstance(first, _NUMBERS):
        return logged.values[-1]
    default = default_join(logged.settings.get("reduce_fx", "mean"), logged.counts)
    return found.best(default)(logged.pieces)
