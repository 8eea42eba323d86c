"""Stochastic rounding to bfloat16, and optimizer steps that are computed in fp32 and rounded so.

bfloat16 keeps 8 significant bits: an update below 2^-9 of a weight is lost when it is rounded to
the nearest value. Rounded up or down at random, with probabilities such that the mean is the exact
value, small updates add up as they do in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from memfit.strategies.single_steps import step_alone

_LOST_BITS = 0xFFFF
"""What fp32 has behind bfloat16, which is its upper half."""
_WHOLE = ...
# Each element is updated by itself, so that a parameter can be stepped in slices.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


class StochasticRounding:
    """Round fp32 to bfloat16 at random, without bias.

    The random bits come from a generator of its own, so that the training's random state (dropout)
    is what it would be without. Its seed is the one that training was seeded with.
    """

    changes_with_steps: ClassVar[bool] = True
    """Says to whoever puts a step back that the generator is part of it."""

    def __init__(self, device_type: str) -> None:
        self._generator = torch.Generator(device_type)
        self._generator.manual_seed(torch.initial_seed())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state given by ``state_dict``."""
        self._generator.set_state(state["generator"].cpu())

    @torch.no_grad()
    def store(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Round values (fp32, overwritten) into targets (bfloat16), all of one shape.

        Random bits are added to those that bfloat16 lacks: they carry into the ones it has with
        the probability that the distance to the next value asks for. They are drawn once for all
        pairs; each is unbiased by itself. Infinities stay; NaN is put back, as its bits could carry
        over into a number.
        """
        noise = self._noise_like(pairs[0][0])
        for values, target in pairs:
            is_nan = values.isnan()
            values.view(torch.int32).add_(noise).bitwise_and_(~_LOST_BITS)
            target.copy_(values).masked_fill_(is_nan, math.nan)

    def _noise_like(self, values: torch.Tensor) -> torch.Tensor:
        """Draw lower halves, two at a time: 64 random bits cost what fewer do."""
        num_words = -(-values.numel() // 2)
        words = torch.empty(num_words, dtype=torch.int64, device=values.device)
        words.random_(-(2**63), None, generator=self._generator)
        noise = words.view(torch.int32)[: values.numel()].view(values.shape)
        return noise.bitwise_and_(_LOST_BITS)


class RoundedStep:
    """Step an optimizer whose parameters are bfloat16 as if they were fp32, and round the result.

    One parameter at a time, or a slice of one where the optimizer treats each element by itself,
    is copied to fp32 with its gradient and states, stepped alone, and rounded back. So the
    temporaries are those of one slice, whatever the optimizer. States shaped like their parameter
    are kept in bfloat16, all others (counts of steps, factored moments) as the optimizer made them.

    Args:
        rounding: how to round.
        most_elements: of a slice.
    """

    def __init__(self, rounding: StochasticRounding, most_elements: int) -> None:
        self._rounding = rounding
        self._most_elements = most_elements

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer; each bfloat16 gradient is dropped as soon as it has been used."""
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients[parameter], parameter.grad = parameter.grad, None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in gradients and parameter.dtype is torch.bfloat16:
                    self._step_one(optimizer, group, parameter, gradients.pop(parameter))
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        # Steps what is not bfloat16, and is the one call that schedulers and hooks count.
        optimizer.step()

    def _step_one(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Step one parameter, slice by slice."""
        values = parameter.data
        kept = after = optimizer.state.get(parameter, {})
        rounded: dict[str, Any] = {}
        try:
            for rows in self._slices(optimizer, values):
                parameter.data = _part(values, rows).float()
                parameter.grad = _part(gradient, rows).float()
                optimizer.state[parameter] = _exact_state(kept, values, rows)
                step_alone(optimizer, group, parameter)
                parameter.grad = None
                pairs = [(parameter.data, _part(values, rows))]
                for key, value in optimizer.state[parameter].items():
                    if not is_shaped_like(value, parameter):
                        rounded[key] = value
                        continue
                    if key not in rounded:
                        rounded[key] = kept[key] if key in kept else torch.empty_like(values)
                    pairs.append((value, _part(rounded[key], rows)))
                self._rounding.store(pairs)
            after = rounded
        finally:
            parameter.data, parameter.grad = values, None
            optimizer.state[parameter] = after

    def _slices(self, optimizer: torch.optim.Optimizer, values: torch.Tensor) -> Iterator[Any]:
        """Yield what selects the rows of each slice."""
        num_elements = values.numel()
        if type(optimizer) not in _ELEMENTWISE or num_elements <= self._most_elements:
            yield _WHOLE
            return
        num_rows = max(1, self._most_elements * values.shape[0] // num_elements)
        for start in range(0, values.shape[0], num_rows):
            yield slice(start, start + num_rows)


def is_shaped_like(value: object, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer's state holds a number for each element of a parameter.

    Never for a parameter without dimensions: its count of steps has the same shape.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() > 0
        and value.shape == parameter.shape
    )


def _part(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    """Select the rows of a slice, as a view."""
    return tensor if rows is _WHOLE else tensor[rows]


def _exact_state(kept: Mapping[str, Any], values: torch.Tensor, rows: Any) -> dict[str, Any]:
    """Copy the states of a slice, those in bfloat16 to fp32."""
    state: dict[str, Any] = {}
    for key, value in kept.items():
        if is_shaped_like(value, values):
            state[key] = _part(value, rows).float()
        elif isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            state[key] = value.float()  # loading a checkpoint gives states their parameter's type
        elif isinstance(value, torch.Tensor) and rows is not _WHOLE:
            state[key] = value.clone()  # a count of steps goes up in place, once for all slices
        else:
            state[key] = value
    return state
