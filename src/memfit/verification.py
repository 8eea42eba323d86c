"""Proves that a plan keeps the results: one planned step against the plain one, in fp64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.job import Job
from memfit.runtime.run import Run, open_plain_session
from memfit.session.batches import find_layout, real_batch
from memfit.session.facts import gather_facts
from memfit.strategies.plan import Plan, worst_numerics
from memfit.trace.events import Phase

_Tensors = Mapping[str, torch.Tensor]
_SMALLEST_SHARE = 1e-4
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a planned step is from the plain one: largest relative errors, as fractions."""

    numerics: str
    loss_error: float
    gradient_error: float
    parameter_error: float
    buffer_error: float
    worst_gradient: str

    @property
    def largest_error(self) -> float:
        """Give the largest of the errors."""
        errors = (self.loss_error, self.gradient_error, self.parameter_error, self.buffer_error)
        return max(errors)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one step left behind."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def verify(
    job: Job, plan: Plan, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Verification:
    """Carry out one step of a job as it is and under a plan, and compare everything it changes.

    Both start from the same parameters, batch and random state, on the CPU.

    Args:
        job: what to run.
        plan: how.
        dtype: floating-point type of parameters and batch; fp64 tells rounding from error.
        seed: of parameters, batch and dropout.

    Does not account for what later steps would amplify.
    """
    layout = find_layout(job)
    torch.manual_seed(seed)
    model = job.model().to(dtype)
    batch = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        real_batch(job, job.batch_size),
    )
    outcomes = []
    for some_plan in (Plan(), plan):
        same_job = replace(job, model=lambda: copy.deepcopy(model))
        session = open_plain_session(same_job, "cpu", layout)
        facts = gather_facts(session)
        torch.manual_seed(seed)
        outcomes.append(_one_step(session, some_plan, batch))
    plain, planned = outcomes
    errors = _relative_errors(planned.gradients, plain.gradients)
    worst = max(errors, key=lambda name: errors[name], default="")
    return Verification(
        numerics=str(worst_numerics(plan.strategies, facts)),
        loss_error=float((planned.loss - plain.loss).abs() / plain.loss.abs().clamp_min(_TINY)),
        gradient_error=errors.get(worst, 0.0),
        parameter_error=_largest_error(planned.parameters, plain.parameters),
        buffer_error=_largest_error(planned.buffers, plain.buffers),
        worst_gradient=worst,
    )


def _one_step(session: Any, plan: Plan, batch: Any) -> _Outcome:
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(phase: Phase) -> None:
        if phase is Phase.OPTIMIZER:
            gradients.update(
                (name, parameter.grad.detach().clone())
                for name, parameter in session.model.named_parameters()
                if parameter.grad is not None
            )

    run = Run(session, plan, phase_listener=keep_gradients)
    loss = run.step(batch).loss
    run.close()
    return _Outcome(
        loss=loss,
        gradients=gradients,
        parameters={name: value.detach() for name, value in session.model.named_parameters()},
        buffers=dict(session.model.named_buffers()),
    )


def _largest_error(found: _Tensors, expected: _Tensors) -> float:
    return max(_relative_errors(found, expected).values(), default=0.0)


def _relative_errors(found: _Tensors, expected: _Tensors) -> dict[str, float]:
    """Give |found - expected| / |expected| of every tensor, in the Euclidean norm.

    A tensor that is zero but for rounding (the bias in front of a batch normalisation has no
    gradient) is held against a ten-thousandth of the norm of all of them.
    """
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    floor = max(_TINY, _SMALLEST_SHARE * math.hypot(*norms.values()))
    return {
        name: float((found[name].double() - value.double()).norm()) / max(norms[name], floor)
        for name, value in expected.items()
    }
