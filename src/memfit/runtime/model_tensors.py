"""Lists a model's tensors in every step without walking its modules every time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

_VALUES = methodcaller("values")


class ModelTensors:
    """List parameters and buffers; the modules are walked anew only where something was exchanged.

    Args:
        model: whose tensors, as they are whenever ``look`` is called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tables: list[Mapping[str, Any]] = []
        self._held: list[Any] = []
        self.buffers: dict[str, torch.Tensor] = {}
        """By name."""
        self.all: list[torch.Tensor] = []
        """Parameters, then buffers."""
        self.look()

    def look(self) -> None:
        """Walk the modules if a parameter, buffer or module has come, gone or been exchanged."""
        held = self._held_now()
        if held and len(held) == len(self._held) and all(map(is_, held, self._held)):
            return
        modules = [*self._model.modules()]
        self._tables = [
            table
            for module in modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._held = self._held_now()
        self.buffers = dict(self._model.named_buffers())
        self.all = [*self._model.parameters(), *self.buffers.values()]

    def _held_now(self) -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, self._tables))]
