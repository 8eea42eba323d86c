"""Applies a plan to a model and an optimizer of a loop that memfit does not own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch.utils._pytree import tree_structure

from memfit.errors import MemfitError, StrategyError
from memfit.job import Job
from memfit.runtime.planned_steps import apply_strategies, undo_all
from memfit.runtime.shards.refusals import refuse_what_does_not_go_with_shards
from memfit.session.batches import BatchLayout
from memfit.session.session import GradientPass, Session
from memfit.session.shard_agreement import agreement_of
from memfit.strategies.base import Seam, Strategy, Undo
from memfit.strategies.plan import Plan

_OFFERED = frozenset({Seam.MODEL, Seam.OPTIMIZER})
_WHO_OFFERS = {
    Seam.FORWARD: "acts around forward and loss, which this loop calls itself",
    Seam.WINDOW: "decides how passes and updates follow one another, which this loop does itself",
    Seam.PROCESS: "has to be set before the process starts; see `memfit run`",
}


class Attached:
    """A plan in force on a model and an optimizer, until it is taken off; made by ``attach``."""

    def __init__(self, plan: Plan, session: Session, undos: Sequence[Undo]) -> None:
        self.plan = plan
        self._session = session
        self._undos = undos
        before = session.job.optimizer(())
        if session.optimizer is not before:
            self._undos = [*undos, before.register_step_pre_hook(_refuse_step).remove]

    @property
    def model(self) -> torch.nn.Module:
        """Return the model, which is the one that was given."""
        return self._session.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer to step with: another one where the plan keeps 8-bit states."""
        return self._session.optimizer

    def detach(self) -> None:
        """Take the plan off: model and optimizer are as they would be without it."""
        undo_all(self._undos)
        self._undos = ()

    def __enter__(self) -> Self:
        """Enter a context at whose end the plan is taken off."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Take the plan off."""
        self.detach()


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Attached:
    """Apply a plan to a model and an optimizer whose loop stays as it is.

    A loop offers its model and its optimizer. What acts around forward and loss, or between two
    updates, needs ``memfit.start`` or an integration.

    Args:
        model: to be trained, before its first forward.
        optimizer: of its parameters, before its first step.
        plan: as ``memfit.plan`` gives it, or written by hand.

    Returns:
        What holds the model and the optimizer to train with, and takes the plan off again.

    Raises:
        StrategyError: if a strategy needs more of the loop, or cannot apply; nothing is changed
            then.
    """
    for strategy in plan.strategies:
        _check_seams(strategy)
    if agreement_of(model) is not None:
        refuse_what_does_not_go_with_shards(plan.strategies)
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    session = Session(
        job=_job_of(model, optimizer),
        device_type=device_type,
        layout=BatchLayout(tree_structure(None), ()),
        model=model,
        optimizer=optimizer,
        gradient_pass=_no_pass,
        micro_batch_size=1,
    )
    return Attached(plan, session, apply_strategies(session, plan.strategies))


def _check_seams(strategy: Strategy) -> None:
    """Refuse a strategy that needs more than a model and an optimizer.

    Raises:
        StrategyError: if it does.
    """
    for seam in Seam:
        if seam in strategy.seams - _OFFERED:
            reason = (
                f"it {_WHO_OFFERS[seam]}. memfit.start runs it, and a plan without it can "
                "be attached."
            )
            raise StrategyError(strategy.name, reason)


def _refuse_step(*_: object) -> None:
    msg = (
        "This optimizer was replaced when the plan was attached, so its step would train without "
        "what the plan keeps. Step with attached.optimizer."
    )
    raise MemfitError(msg)


def _job_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Job:
    """Make a job of what is there; what the loop keeps to itself must not be asked for."""
    return Job(
        model=lambda: model,
        batch=_not_known,
        loss=_not_known,
        optimizer=lambda _: optimizer,
        batch_size=1,
        name="attached",
    )


def _not_known(*_: object) -> torch.Tensor:
    raise AssertionError("an attached plan knows neither batch nor loss")


_no_pass: GradientPass = _not_known
