"""Make any PyTorch training step fit the memory there is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit._version import __version__ as __version__
    from memfit.devices.placement import Placement as Placement
    from memfit.errors import MemfitError as MemfitError
    from memfit.errors import MemfitWarning as MemfitWarning
    from memfit.figures import Measurement as Measurement
    from memfit.figures import Prediction as Prediction
    from memfit.job import Job as Job
    from memfit.job import Total as Total
    from memfit.measurement.measure import measure as measure
    from memfit.observe.enforced_budget import EnforcedBudget as EnforcedBudget
    from memfit.observe.leaks import LeakFinder as LeakFinder
    from memfit.observe.leaks import LeakLimits as LeakLimits
    from memfit.planner.planning import plan as plan
    from memfit.planner.result.planning_result import PlanningResult as PlanningResult
    from memfit.prediction.predict import predict as predict
    from memfit.prediction.predict import predict_step as predict_step
    from memfit.runtime.attach import Attached as Attached
    from memfit.runtime.attach import attach as attach
    from memfit.runtime.guard.guard import GuardSettings as GuardSettings
    from memfit.runtime.run import Run as Run
    from memfit.runtime.start import start as start
    from memfit.script.drawn_batches import DrawnBatches as DrawnBatches
    from memfit.snapshots.replaying import replay as replay
    from memfit.strategies.plan import Plan as Plan
    from memfit.verification.verify import verify as verify

# Resolved on first use, so that `memfit --help` never imports torch.
_HOMES = {
    "__version__": "memfit._version",
    "Attached": "memfit.runtime.attach",
    "DrawnBatches": "memfit.script.drawn_batches",
    "EnforcedBudget": "memfit.observe.enforced_budget",
    "GuardSettings": "memfit.runtime.guard.guard",
    "Job": "memfit.job",
    "LeakFinder": "memfit.observe.leaks",
    "LeakLimits": "memfit.observe.leaks",
    "Measurement": "memfit.figures",
    "MemfitError": "memfit.errors",
    "MemfitWarning": "memfit.errors",
    "Placement": "memfit.devices.placement",
    "Plan": "memfit.strategies.plan",
    "PlanningResult": "memfit.planner.result.planning_result",
    "Prediction": "memfit.figures",
    "Run": "memfit.runtime.run",
    "Total": "memfit.job",
    "attach": "memfit.runtime.attach",
    "measure": "memfit.measurement.measure",
    "plan": "memfit.planner.planning",
    "predict": "memfit.prediction.predict",
    "predict_step": "memfit.prediction.predict",
    "replay": "memfit.snapshots.replaying",
    "start": "memfit.runtime.start",
    "verify": "memfit.verification.verify",
}

__all__ = [
    "Attached",
    "DrawnBatches",
    "EnforcedBudget",
    "GuardSettings",
    "Job",
    "LeakFinder",
    "LeakLimits",
    "Measurement",
    "MemfitError",
    "MemfitWarning",
    "Placement",
    "Plan",
    "PlanningResult",
    "Prediction",
    "Run",
    "Total",
    "attach",
    "measure",
    "plan",
    "predict",
    "predict_step",
    "replay",
    "start",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        msg = f"module 'memfit' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
