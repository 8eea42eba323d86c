"""The tensors that are too large to be copied before every step, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memfit.live_state.findings import is_plain
from memfit.session.session import Session


class LargeTensors:
    """List parameters, optimizer states and what else is kept in the file alone.

    Args:
        session: whose.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.optimizers: list[torch.optim.Optimizer] = [session.optimizer]
        """All that can be reached: one may hold another."""
        self.others: dict[str, torch.Tensor] = {}
        """Large buffers and the like, by the place where they are held."""

    def named(self) -> dict[str, torch.Tensor]:
        """Return all as they are bound now."""
        return {
            **{f"parameter {name}": each for name, each in self.parameters().items()},
            **{f"optimizer state {name}": each for name, each in self.states().items()},
            **self.others,
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the model, and those that the optimizer alone has."""
        named: dict[str, torch.Tensor] = dict(self._session.model.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        for number, parameter in enumerate(parameters_of(self._session.optimizer)):
            if id(parameter) not in known:
                named[f"of the optimizer, number {number}"] = parameter
        return named

    def states(self) -> dict[str, torch.Tensor]:
        """Return what optimizers keep for each parameter, by the parameter's name."""
        names = {id(each): name for name, each in self._session.model.named_parameters()}
        states = {id(each.state): each.state for each in self.optimizers}  # some share one
        return {
            f"{'' if not which else f'({which + 1}) '}{names.get(id(key), number)}{place}": tensor
            for which, state in enumerate(states.values())
            for number, (key, held) in enumerate(state.items())
            if isinstance(key, torch.Tensor)
            for place, tensor in _tensors_in(held)
        }

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients, None where there is none."""
        named = self.parameters()
        return {f"gradient of {name}": parameter.grad for name, parameter in named.items()}

    def now(self) -> dict[str, torch.Tensor | None]:
        """Return all with their gradients."""
        return {**self.named(), **self.gradients()}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List an optimizer's parameters in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer keeps for its parameters."""
    for key, held in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            yield from (tensor for _, tensor in _tensors_in(held))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies on this rank: the shard of a DTensor, others as they are."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """List what lies on this rank of those tensors that are not here whole."""
    return [part for each in tensors if (part := local_part(each)) is not each]


def _tensors_in(held: Any, place: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(held, torch.Tensor):
        yield place, held
    elif isinstance(held, dict):
        for key, value in held.items():
            yield from _tensors_in(value, f"{place}.{key}")
    elif isinstance(held, (list, tuple)):
        for number, value in enumerate(held):
            yield from _tensors_in(value, f"{place}[{number}]")


def options_of(
    group: dict[str, Any], copied: Callable[[Any], Any] = copy.deepcopy
) -> dict[str, Any]:
    """Copy the settings of a group of parameters, such as its learning rate."""
    return {
        name: value if is_plain(value) else copied(value)
        for name, value in group.items()
        if name != "params"
    }
