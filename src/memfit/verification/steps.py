"""Runs the same steps twice, and says how far the results are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.comparison.left_behind import LeftBehind, differing_draws, differing_values
from memfit.comparison.left_behind import without as left_without
from memfit.comparison.relative_errors import (
    SMALLEST,
    Tensors,
    as_error,
    gaps,
    norms_of,
    relative_errors,
)
from memfit.live_state.harmless import Instrument
from memfit.runtime.run import unguarded_run
from memfit.session.session import Session
from memfit.strategies.plan import Plan
from memfit.trace.events import Phase

_LOSS_CHANGE = 1e-5
_PARAMETER_CHANGE = 1e-4
_DISTANCES = (1.0, 0.1, 0.01, 10.0)
"""Near by there are fewer kinks, as relu has them; far off the rounding of fp32 counts less."""
_MOST_SKIPPED = 30
"""As often as a scale of 2^16 can be halved until it is far below one."""


@dataclass(frozen=True, slots=True)
class StepResults:
    """What some steps left behind: loss and gradients of the first, the rest after the last."""

    loss: torch.Tensor
    gradients: Tensors
    parameters: Tensors
    buffers: Tensors
    left: LeftBehind = field(default_factory=LeftBehind)
    """Whatever else can be reached after the last step."""
    num_skipped: int = 0
    """Steps before the first that changed no parameter: a loss scale was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far results are from those of other steps: largest relative errors, as fractions."""

    loss: float
    gradient: float
    parameter: float
    buffer: float
    worst_gradient: str
    """The parameter whose gradient is furthest off."""
    worst: str
    """What is furthest off of all."""
    whole_gradient: float
    """The error of all gradients as one vector."""
    gradients: Mapping[str, float] = field(default_factory=dict)
    """By parameter."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    effect: float = 0.0
    """Of the tensors and numbers that are reached otherwise: optimizer states, attributes,
    closures."""
    effects: tuple[str, ...] = ()
    """What else is not the same, such as a count, in a sentence each."""
    draws: tuple[str, ...] = ()
    """Generators of random numbers that were drawn from more or less often."""

    @property
    def largest(self) -> float:
        """Return the largest of the errors."""
        return max(self.loss, self.gradient, self.parameter, self.buffer, self.effect)


def run_steps(
    session: Session,
    plan: Plan,
    batch: Any,
    *,
    num_steps: int,
    read: Callable[[Session], LeftBehind] | None = None,
) -> StepResults:
    """Run steps of a session under a plan, all on one batch.

    Args:
        session: whose steps.
        plan: how.
        batch: what all steps are done on.
        num_steps: how many steps.
        read: reads what the steps have left behind; None leaves it out.
    """
    # Hooks come before those of strategies: an optimizer inside backward frees each gradient.
    gradients, handles = _kept_gradients(session)
    is_first = True

    def keep_gradients(phase: Phase) -> None:
        if phase is Phase.OPTIMIZER and is_first:
            gradients.update(
                (name, _copy_of(parameter.grad))
                for name, parameter in session.model.named_parameters()
                if parameter.grad is not None
            )

    run = unguarded_run(session, plan, phase_listener=keep_gradients)
    begin = _StartingPoint(session.model)
    loss, num_skipped = run.step(batch).loss, 0
    while num_skipped < _MOST_SKIPPED and _was_skipped(session.model, gradients):
        num_skipped += 1
        begin.restore()
        loss = run.step(batch).loss
    is_first, of_first = False, dict(gradients)
    for _ in range(num_steps - 1):
        run.step(batch)
    run.close()
    for handle in handles:
        handle.remove()
    return StepResults(
        loss=loss,
        gradients=of_first,
        parameters={name: value.detach() for name, value in session.model.named_parameters()},
        buffers={name: value.detach() for name, value in session.model.named_buffers()},
        left=LeftBehind() if read is None else read(session),
        num_skipped=num_skipped,
    )


class _StartingPoint:
    """The random state, and the buffers, that a skipped step must not have moved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._random_state = torch.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Put both back."""
        torch.set_rng_state(self._random_state)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


def _was_skipped(model: torch.nn.Module, gradients: Tensors) -> bool:
    """Test whether a step had gradients that are no numbers, and kept them from the parameters."""
    if all(bool(value.isfinite().all()) for value in gradients.values()):
        return False
    return all(bool(value.isfinite().all()) for value in model.parameters())


def compare(
    found: StepResults, expected: StepResults, *, without: frozenset[str] = frozenset()
) -> Errors:
    """Return how far results are from the expected ones, without some things left behind."""
    found = replace(found, left=left_without(found.left, without))
    expected = replace(expected, left=left_without(expected.left, without))
    gap = float((found.loss.double() - expected.loss.double()).abs())
    loss = as_error(gap, max(float(expected.loss.double().abs()), SMALLEST))
    errors = {"loss": loss}
    largest, by_name = {}, {}
    for kind, (found_tensors, expected_tensors) in _kinds(found, expected).items():
        by_name[kind] = of_kind = relative_errors(found_tensors, expected_tensors)
        name = max(of_kind, key=lambda each: of_kind[each], default="")
        largest[kind] = (of_kind.get(name, 0.0), name)
        errors[f"{kind} {name}"] = largest[kind][0]
    return Errors(
        loss=loss,
        gradient=largest["gradient of"][0],
        parameter=largest["parameter"][0],
        buffer=largest["buffer"][0],
        worst_gradient=largest["gradient of"][1],
        worst=max(errors, key=lambda each: errors[each]),
        whole_gradient=as_error(
            math.hypot(*gaps(found.gradients, expected.gradients).values()),
            max(math.hypot(*norms_of(expected.gradients).values()), SMALLEST),
        ),
        gradients=by_name["gradient of"],
        parameters=by_name["parameter"],
        effect=largest["effect on"][0],
        effects=tuple(differing_values(found.left, expected.left)),
        draws=tuple(differing_draws(found.left, expected.left)),
    )


def _kinds(found: StepResults, expected: StepResults) -> dict[str, tuple[Tensors, Tensors]]:
    return {
        "gradient of": (found.gradients, expected.gradients),
        "parameter": (found.parameters, expected.parameters),
        "buffer": (found.buffers, expected.buffers),
        "effect on": (found.left.tensors, expected.left.tensors),
    }


def slope_error(results_at: Callable[[float, Tensors], StepResults], bound: float) -> float:
    """Return how far a gradient is from the slope of the loss along it, at the best distance.

    A gradient that is none is off at every distance. One that is right may be off at some, where
    the loss has kinks or parts of it are rounded to fp32.

    All losses are computed in fp64 and with the same random draws. An activation that is computed
    again with other draws than the first time shows: the gradient is then that of no loss at all.

    Args:
        results_at: gives the results of a step from parameters that were moved so many times a
            direction; what the direction does not name stays.
        bound: of an error that no better one is looked for.
    """
    here = results_at(0.0, {})
    gradient = here.gradients
    norm = math.hypot(*norms_of(gradient).values())
    if norm == 0.0:
        return 0.0
    step = min(
        _LOSS_CHANGE * max(abs(float(here.loss)), SMALLEST) / norm**2,
        _PARAMETER_CHANGE * math.hypot(*norms_of(here.parameters).values()) / norm,
    )
    smallest = math.inf
    for distance in (step * each for each in _DISTANCES):
        ahead, behind = (float(results_at(to, gradient).loss) for to in (distance, -distance))
        slope = (ahead - behind) / (2.0 * distance)
        smallest = min(smallest, as_error(abs(slope - norm**2), norm**2))
        if smallest <= bound:
            break
    return smallest


@dataclass(frozen=True, slots=True)
class _GradientKeeper(Instrument):
    """Copies a parameter's gradient when it is whole."""

    gradients: dict[str, torch.Tensor]
    name: str

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the place of a gradient that was not whole yet."""
        if parameter.grad is not None:
            self.gradients[self.name] = _copy_of(parameter.grad)


def _copy_of(gradient: torch.Tensor) -> torch.Tensor:
    """Copy a gradient, a sparse one as the dense one that it stands for."""
    found = gradient.detach()
    return found.clone() if found.layout is torch.strided else found.to_dense()


def _kept_gradients(session: Session) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Get a dictionary that fills with gradients as they become whole, and the hooks' handles."""
    gradients: dict[str, torch.Tensor] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(_GradientKeeper(gradients, name))
        for name, parameter in session.model.named_parameters()
        if parameter.requires_grad
    ]
    return gradients, handles
