"""Metrics of torchmetrics in a module: they add up over the pieces of a batch, as over batches.

A metric that a training step calls keeps a state that depends on the samples it is given. While a
batch is run, a proxy stands in its place, so that forwards of pieces leave the module as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import MemfitError
from memfit.live_state.harmless import Instrument

_KINDS = ("Metric", "MetricCollection")


class _Calls(Instrument):
    """What a proxy does with the calls that are meant for its metric.

    Args:
        metric: the real one.
        name: of the metric in the module.
        owner: knows how the batch is run.
    """

    def __init__(self, metric: Any, name: str, owner: Metrics) -> None:
        self.metric, self.name, self._owner = metric, name, owner
        self._of_batch: list[Any] = []
        """Copies with the state of this batch alone, one for each call in a forward."""
        self.num_calls = 0
        self.has_pieces = False

    def begin(self) -> None:
        """Begin a batch."""
        self._of_batch, self.has_pieces = [], False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take up some samples, and return the value for them."""
        owner = self._owner
        if not owner.takes:
            return _value_alone(self.metric, args, kwargs)
        if owner.is_whole:
            return self.metric(*args, **kwargs)
        self.has_pieces = True
        number, self.num_calls = self.num_calls, self.num_calls + 1
        value = _value_alone(self.metric, args, kwargs)
        owner.put_off(lambda: self._take_up(number, args, kwargs))
        owner.note(value, self, number)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take up some samples."""
        if not self._owner.takes:
            return
        if self._owner.is_whole:
            self.metric.update(*args, **kwargs)
            return
        self.has_pieces = True
        self._owner.put_off(lambda: self.metric.update(*args, **kwargs))

    def reset(self) -> None:
        """Forget all samples.

        Raises:
            MemfitError: where the batch is run in pieces, each of which would forget the others.
        """
        owner = self._owner
        if owner.takes and not owner.is_whole:
            raise MemfitError(
                f"training_step resets the metric {self.name}, while the batch is run in pieces, "
                "each of which would forget the others. Reset it in on_train_batch_start or when "
                "an epoch ends."
            )
        if owner.takes or not owner.is_in_forward:
            self.metric.reset()

    def _take_up(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take up the samples of a forward that has come to its end."""
        if number == len(self._of_batch):
            self._of_batch.append(_emptied(self.metric))
        self.metric.update(*args, **kwargs)
        self._of_batch[number].update(*args, **kwargs)

    def batch_value(self, number: int) -> Any:
        """Return the value of a call over the pieces of the batch."""
        return self._of_batch[number].compute()

    def end(self) -> None:
        """Leave behind what a call with the whole batch leaves: its value, to be logged."""
        if not self._of_batch:
            return
        value = self.batch_value(-1)
        if not isinstance(value, dict):
            self.metric._forward_cache = value
            return
        for name, each in self.metric.items(keep_base=True, copy_state=False):
            each._forward_cache = value.get(name, value.get(self.metric._set_name(name)))


class MetricProxy(torch.nn.Module):
    """Stand in the place of a metric; made by ``Metrics``."""

    stands_for_metric = True

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take up some samples, and return the value for them."""
        return self._calls.forward(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take up some samples."""
        self._calls.update(*args, **kwargs)

    def reset(self) -> None:
        """Forget all samples; refused where the batch is run in pieces."""
        self._calls.reset()

    def compute(self) -> Any:
        """Refuse to tell the value so far, of which pieces are a part already.

        Raises:
            MemfitError: where the batch is run in pieces.
        """
        if self._calls.has_pieces:
            raise MemfitError(
                f"training_step asks the metric {self._calls.name} for its value so far, while "
                "the batch is run in pieces. Log the metric itself: self.log(name, metric)."
            )
        return self._calls.metric.compute()

    def __getattr__(self, name: str) -> Any:
        if name == "_calls":
            return super().__getattr__(name)
        return getattr(self._calls.metric, name)


class Metrics:
    """The outermost metrics of a module, and what they were called with in this batch.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[Any, str, Any, MetricProxy]] = []
        self._find(module, "")
        self._values: dict[int, tuple[torch.Tensor, _Calls, int, str]] = {}
        self._depth = 0
        self.counts = False
        """Whether what is run is the training itself, not a recording or a trial."""
        self.is_whole = True
        """Whether a forward gets the whole batch."""
        self.takes = False
        """Whether samples are taken up: in a forward of the training itself, with gradients."""
        self.is_in_forward = False
        self._put_off: list[Callable[[], None]] = []

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Have proxies in the places of metrics."""
        self._depth += 1
        if self._depth == 1:
            for parts, name, _, proxy in self._places:
                parts[name] = proxy
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for parts, name, metric, _ in self._places:
                    parts[name] = metric

    def begin_batch(self) -> None:
        """Forget the batch before."""
        self._values.clear()
        for *_, proxy in self._places:
            proxy._calls.begin()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Take up what metrics are called with inside, once the forward has come to its end.

        Forwards that find statistics, or stop half way, leave nothing behind; neither does one that
        is run again in backward, which is outside.
        """
        for *_, proxy in self._places:
            proxy._calls.num_calls = 0
        self._put_off, self.is_in_forward = [], True
        self.takes = self.counts and torch.is_grad_enabled()
        try:
            yield
            for take_up in self._put_off:
                take_up()
        finally:
            self.takes = self.is_in_forward = False
            self._put_off = []

    def put_off(self, take_up: Callable[[], None]) -> None:
        """Take up some samples at the end of the forward."""
        self._put_off.append(take_up)

    def end_batch(self) -> None:
        """Leave the values of the batch where they are looked for when metrics are logged."""
        for *_, proxy in self._places:
            proxy._calls.end()

    def note(self, value: Any, calls: _Calls, number: int) -> None:
        """Note which call gave a value, so that the batch's own can be logged for it."""
        for key, each in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(each, torch.Tensor):
                self._values[id(each)] = (each, calls, number, key)

    def noted(self, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Let a copy of a value stand for the same call."""
        if id(value) in self._values:
            self._values[id(copy)] = (copy, *self._values[id(value)][1:])
        return copy

    def of_batch(self, value: Any) -> Any:
        """Return what is to be logged where a piece logged a metric or its value; else None."""
        if isinstance(value, MetricProxy):
            return value._calls.metric
        if id(value) not in self._values:
            return None
        _, calls, number, key = self._values[id(value)]
        found = calls.batch_value(number)
        return found[key] if isinstance(found, dict) else found

    def _find(self, module: torch.nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            kinds = type(child).__mro__
            if any(
                kind.__name__ in _KINDS and kind.__module__.startswith("torchmetrics.")
                for kind in kinds
            ):
                proxy = MetricProxy(_Calls(child, f"{prefix}{name}", self))
                self._places.append((module._modules, name, child, proxy))
            else:
                self._find(child, f"{prefix}{name}.")


def _emptied(metric: Any) -> Any:
    """Copy a metric without what it has added up."""
    made = copy.deepcopy(metric)
    made.reset()
    return made


def _value_alone(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value for some samples alone; zero where a recording has no values to look at."""
    try:
        return _emptied(metric)(*args, **kwargs)
    except (MemfitError, RuntimeError, ValueError):
        if not any(isinstance(each, FakeTensor) for each in args):
            raise
        if isinstance(metric, torch.nn.ModuleDict):  # a collection
            return {name: torch.zeros(()) for name in metric.keys()}  # noqa: SIM118 - prefixed
        return torch.zeros(())
