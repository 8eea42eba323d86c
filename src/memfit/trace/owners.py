"""Names the purpose of the tensors that models, optimizers and batches hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch

from memfit.trace.events import Category
from memfit.trace.origins import line_of_optimizer


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor whose purpose is known, the module that holds it, and the line that made it."""

    tensor: torch.Tensor
    category: Category
    module: str
    source_line: str = ""

    @classmethod
    def with_parameter(
        cls, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, module: str
    ) -> Iterator[Self]:
        """Yield a parameter, its gradient and its optimizer states."""
        yield from cls.with_gradient(parameter, module)
        states = optimizer.state.get(parameter, {})
        line = line_of_optimizer(optimizer) if states else ""
        for value in states.values():
            if isinstance(value, torch.Tensor):
                yield cls(value, Category.OPTIMIZER_STATE, module, line)

    @classmethod
    def with_gradient(cls, parameter: torch.Tensor, module: str) -> Iterator[Self]:
        """Yield a parameter and its gradient."""
        yield cls(parameter, Category.PARAMETERS, module)
        if parameter.grad is not None:
            yield cls(parameter.grad, Category.GRADIENTS, module)


Owners = Callable[[], Iterable[Owned]]
