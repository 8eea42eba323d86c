"""What a sharded checkpoint holds: tensors that ranks share, and what each rank has for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from memfit.errors import MemfitError
from memfit.runtime.guard.large_tensors import LargeTensors, local_part, options_of
from memfit.session.session import Session

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLAGS = ("fused", "foreach")
"""Of an optimizer's groups: how this run computes, and no state."""


Form = tuple[tuple[int, ...], torch.dtype, bool, bool]
"""What a tensor of an optimizer looks like: shape, type, whether it is sharded, and whether it lies
where its parameter does."""


def parameter_tensors(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters under the names that a checkpoint has them under."""
    return {f"parameter {name}": each.detach() for name, each in parameters.items()}


def kept_states(session: Session) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's tensors by name, and what describes them and what is beside them.

    Raises:
        MemfitError: if it keeps something that cannot be saved in shards.
    """
    parameters, state = LargeTensors(session).parameters(), session.optimizer.state
    if unnamed := [key for key in state if not isinstance(key, torch.Tensor)]:
        msg = (
            f"The optimizer keeps {unnamed[0]!r} beside its parameters, which has no shards. Save "
            "run.state_dict() instead."
        )
        raise MemfitError(msg)
    tensors: dict[str, torch.Tensor] = {}
    forms: dict[str, dict[str, Form]] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter not in state:
            continue
        forms[name], others[name] = {}, {}
        for key, value in state[parameter].items():
            if isinstance(value, torch.Tensor):
                tensors[_key(name, key)] = value.detach()
                forms[name][key] = _form(name, key, value, parameter)
            else:
                others[name][key] = value
    groups = [options_of(group) for group in session.optimizer.param_groups]
    return tensors, {
        "parameters": [*parameters],
        "forms": forms,
        "others": others,
        "groups": groups,
    }


@dataclass(frozen=True, slots=True)
class RebuiltStates:
    """Tensors of an optimizer that are to be filled, and what is beside them."""

    tensors: dict[str, torch.Tensor]
    described: Mapping[str, Any]

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], described: Mapping[str, Any]) -> Self:
        """Make empty tensors for saved states, sharded as their parameters are here."""
        tensors = {
            _key(name, key): _empty(form, parameters[name])
            for name, forms in described["forms"].items()
            for key, form in forms.items()
        }
        return cls(tensors, described)

    def take_up(self, session: Session, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the states, filled, to the optimizer."""
        state, forms = session.optimizer.state, self.described["forms"]
        for name, parameter in parameters.items():
            state.pop(parameter, None)
            if name in forms:
                filled = {key: self.tensors[_key(name, key)] for key in forms[name]}
                state[parameter] = {**filled, **self.described["others"][name]}
        groups = zip(session.optimizer.param_groups, self.described["groups"], strict=True)
        for group, options in groups:
            group.update({key: each for key, each in options.items() if key not in _FLAGS})


def own_state(session: Session) -> dict[str, Any]:
    """Return what each rank has for itself: buffers and the like, stateful parts, generators."""
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    name, words, *others = np.random.get_state()
    return {
        "rest of the model": dict(_rest_of_model(session)),
        "stateful": {name: part.state_dict() for name, part in session.stateful.items()},
        "torch": torch.get_rng_state(),
        "cards": cards,
        "python": random.getstate(),
        "numpy": (name, [*map(int, words)], *others),
    }


def put_own_state_back(session: Session, state: Mapping[str, Any], *, is_own: bool) -> None:
    """Put back what a rank had; generators only where it is the rank's own."""
    model = {**session.model.state_dict(), **state["rest of the model"]}
    session.model.load_state_dict(model)
    for name, part in session.stateful.items():
        if name in state["stateful"]:
            part.load_state_dict(state["stateful"][name])
    if not is_own:
        return
    torch.set_rng_state(state["torch"])
    if state["cards"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cards"])
    random.setstate(state["python"])
    name, words, *others = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *others))


def _rest_of_model(session: Session) -> Iterator[tuple[str, Any]]:
    """Yield what of a model's state is no parameter, by name."""
    parameters = {id(each) for each in session.model.parameters()}
    for name, value in session.model.state_dict(keep_vars=True).items():
        if id(value) not in parameters:
            yield name, value.detach() if isinstance(value, torch.Tensor) else value


def _key(name: str, key: str) -> str:
    return f"optimizer {key} of {name}"


def _form(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> Form:
    if type(local_part(value)) not in _PLAIN:
        msg = (
            f"The optimizer keeps {key} of {name} as {type(local_part(value)).__name__}, which "
            "cannot be saved in shards. Save run.state_dict() instead."
        )
        raise MemfitError(msg)
    is_there = value.device == parameter.device
    return tuple(value.shape), value.dtype, local_part(value) is not value, is_there


def _empty(form: Form, parameter: torch.Tensor) -> torch.Tensor:
    shape, dtype, is_sharded, is_there = form
    has_its_shape = shape == tuple(parameter.shape)
    if local_part(parameter) is parameter or not (is_sharded or has_its_shape):
        return torch.zeros(shape, dtype=dtype, device=parameter.device if is_there else "cpu")
    if has_its_shape:
        return torch.zeros_like(parameter, dtype=dtype).detach()
    from torch.distributed.tensor import zeros  # noqa: PLC0415 - importing it takes seconds

    like: Any = parameter
    return zeros(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
