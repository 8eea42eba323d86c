"""What strategies and the planner need to know of a job, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch

from memfit.separation.separation import Separation
from memfit.session.block_levels import block_levels
from memfit.session.evaluation_mode import modules_in_evaluation
from memfit.session.optimizer_facts import (
    attachments_of,
    options_in_use,
    package_of,
    parameter_dtypes_of,
)
from memfit.session.own_precision import OwnPrecision
from memfit.session.session import Session

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)
Own = TypeVar("Own")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Describe a job to the strategies."""

    batch_size: int
    device_type: str
    batch_norms: tuple[str, ...]
    """Modules whose training statistics couple the samples of a batch."""
    has_dropout: bool
    """Whether a module draws random masks; see ``draws_random`` too."""
    block_levels: tuple[tuple[str, ...], ...]
    """Names of repeated modules: the outermost repetition first, then the ones inside it."""
    optimizer: str
    module_names: tuple[str, ...] = ()
    """Every module below the model, by name."""
    clips_gradients: bool = False
    """Whether the global gradient norm is clipped, so that every gradient is needed at once."""
    optimizer_package: str = "torch.optim"
    """The package that the optimizer comes from."""
    optimizer_options: tuple[str, ...] = ()
    """The optimizer's settings that are neither zero, False nor None in some parameter group."""
    optimizer_attachments: tuple[str, ...] = ()
    """What has been attached to the optimizer's step; see memfit.session.optimizer_facts."""
    parameter_dtypes: tuple[str, ...] = ()
    """The types of the parameters that are trained."""
    modules_in_evaluation: tuple[str, ...] = ()
    """The outermost modules in evaluation mode; see memfit.session.evaluation_mode."""
    own_precision: OwnPrecision = field(default_factory=OwnPrecision)
    """What the job's own code does to its precision, as far as a step has been seen."""
    draws_random: bool | None = None
    """Whether a step draws random numbers at all, by whatever library; None where no step has been
    seen yet."""
    own: tuple[object, ...] = ()
    """What single strategies have found for themselves, each of a type of its own."""
    separation: Separation | None = field(default=None, compare=False, repr=False)
    """Says whether pieces of a batch keep the results; None where that cannot be asked."""

    def of(self, kind: type[Own]) -> Own:
        """Return what a strategy has found for itself; ``kind()`` where it has not looked yet."""
        return next((each for each in self.own if isinstance(each, kind)), None) or kind()


def shared_facts(session: Session, separation: Separation | None = None) -> JobFacts:
    """Look at a session's model and optimizer for what more than one strategy needs to know."""
    if session.facts is not None:
        facts: JobFacts = session.facts
        return facts
    modules = list(session.model.named_modules())
    return JobFacts(
        batch_size=session.job.batch_size,
        device_type=session.device_type,
        batch_norms=tuple(
            name for name, module in modules if isinstance(module, BatchNorm) and module.training
        ),
        has_dropout=any(_drops(module) for _, module in modules),
        block_levels=block_levels(session.model),
        optimizer=type(session.optimizer).__name__,
        module_names=tuple(name for name, _ in modules if name),
        clips_gradients=(
            session.job.clip_grad_norm is not None or session.job.order.before_update is not None
        ),
        optimizer_package=package_of(session.optimizer),
        optimizer_options=options_in_use(session.optimizer),
        optimizer_attachments=attachments_of(session.optimizer),
        parameter_dtypes=parameter_dtypes_of(session.optimizer),
        modules_in_evaluation=modules_in_evaluation(session.model),
        separation=separation or Separation(session.job, session.layout),
    )


def own_autocast_obstacle(facts: JobFacts) -> str | None:
    """Return why no autocast is put around a job; None if its loss has none of its own."""
    own = facts.own_precision
    if not own.autocast:
        return None
    return (
        f"the job's loss runs under an autocast of its own, in {own.autocast} "
        f"({own.autocast_line}), which has precedence. Take it out to have memfit choose."
    )


def known_separation(session: Session) -> Separation | None:
    """Return what says whether pieces of a batch keep the results; None where nobody has looked."""
    facts: JobFacts | None = session.facts
    return None if facts is None else facts.separation


def _drops(module: torch.nn.Module) -> bool:
    """Return whether a module draws random masks in training."""
    if isinstance(module, _DROPOUTS):
        return module.training and module.p > 0
    rates = (getattr(module, name, 0.0) for name in ("dropout", "attention_dropout"))
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
