"""Optimizer in backward: a parameter is updated, and its gradient freed, during backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from memfit.errors import StrategyError
from memfit.live_state.harmless import Instrument
from memfit.session.session import GradientPass, PhaseListener, Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.single_steps import PACKAGES, attachment_obstacle, step_alone
from memfit.trace.events import Category, Phase

_NEED_ALL_GRADIENTS = ("LBFGS",)


@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward(Strategy):
    """Update each parameter as soon as its gradient is whole, and drop the gradient.

    The job's own optimizer makes the update, with its states and parameter groups, so schedulers
    and checkpoints go on as before. A weight that is used several times is updated once, with its
    whole gradient. The update at the end of the step finds no gradients left and does nothing but
    call ``optimizer.step()`` once, which is what schedulers and hooks count.

    Limits: no clipping of the global gradient norm, no accumulation over micro-batches and no
    gradient scaler, all of which need every gradient before the first update. Optimizers that look
    at all parameters at once, or that are not known, are refused. Hooks before ``optimizer.step``
    would find no gradients: those of the job are refused; do not add any to a run. A step that
    fails half way has updated some parameters. A weight that backward still reads after its own
    gradient is whole (because it is also used detached) makes autograd raise an error.
    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    and Lv et al. 2023 (LOMO), https://arxiv.org/abs/2306.09782, section 3.
    """

    name: ClassVar[str] = "optimizer-in-backward"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.WINDOW})
    not_with_shards: ClassVar[str] = (
        "an update in the middle of a pass that ranks go through together was not shown to be "
        "undone on all of them where one fails"
    )
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.GRADIENTS: 1.0,
        Category.TEMPORARIES: 1.0,
    }
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.OPTIMIZER,)
    never_faster: ClassVar[bool] = True
    costs_little: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "micro-batching": (
            "an update needs the gradients of all pieces, which are added up after one another"
        ),
        "batchnorm-replay": (
            "an update needs the gradients of all passes, which are added up after one another"
        ),
        "fp16": ("gradients are scaled back, and a step skipped, only when all of them are there"),
        "pure-bf16": (
            "updates inside backward would be rounded to the nearest value and so be lost"
        ),
    }

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse what needs all gradients at once."""
        if facts.clips_gradients:
            return (
                "the job clips the global gradient norm, which is known only when every gradient "
                "is; leave out clip_grad_norm if it is not needed."
            )
        if facts.optimizer_package not in PACKAGES or facts.optimizer in _NEED_ALL_GRADIENTS:
            return (
                f"{facts.optimizer} may need the gradients of all parameters at once; optimizers "
                f"of torch.optim and bitsandbytes do not, except {_NEED_ALL_GRADIENTS[0]}."
            )
        return attachment_obstacle(facts)

    def apply(self, session: Session) -> Undo:
        """Have the gradient pass update as it goes."""
        updating = partial(_update_in_backward, session.gradient_pass)
        return session.replace(gradient_pass=updating, updates_in_backward=True)


def _update_in_backward(
    gradient_pass: GradientPass, session: Session, batch: Any, enter_phase: PhaseListener
) -> torch.Tensor:
    """Compute gradients, updating each parameter when its gradient is whole."""
    with _updating(session):
        return gradient_pass(session, batch, enter_phase)


@contextmanager
def _updating(session: Session) -> Iterator[None]:
    """Update the optimizer's parameters in backward for as long as the context lasts."""
    updated: set[torch.Tensor] = set()
    handles = [
        parameter.register_post_accumulate_grad_hook(_Updater(session, group, updated))
        for group in session.optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Updater(Instrument):
    """Update a parameter of a group when its gradient is whole.

    Blocks that are run again look for what has come to their parameters. This leads to nothing of
    theirs: without the mark they would look through the whole optimizer in every forward.
    """

    session: Session
    group: dict[str, Any]
    updated: set[torch.Tensor]

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter in self.updated:
            raise StrategyError(OptimizerInBackward.name, _IN_PARTS.format(tuple(parameter.shape)))
        self.updated.add(parameter)
        with ExitStack() as contexts:
            for context in self.session.update_contexts:
                contexts.enter_context(context(parameter))
            step_alone(self.session.optimizer, self.group, parameter)
        parameter.grad = None
        # Not every optimizer's kernel tells autograd that it has changed the parameter.
        torch.autograd.graph.increment_version(parameter)


_IN_PARTS = (
    "the gradient of a parameter of shape {} came in several parts, the first of which has been "
    "applied already. Go backward once per step, and use checkpoint(..., use_reentrant=False) "
    "where a weight is shared."
)
