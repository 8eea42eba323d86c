"""Plans: records the job as it is, searches the catalogue, and says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError, UsageError
from memfit.figures import Prediction
from memfit.job import Job
from memfit.planner.choices import Choices, gather_choices
from memfit.planner.explanation import considered_plans
from memfit.planner.search import Candidate, Search, Strategies
from memfit.prediction import default_budget_of, evaluate
from memfit.recording import record
from memfit.session.batches import find_layout
from memfit.strategies.base import Numerics
from memfit.strategies.plan import Plan
from memfit.units import parse_bytes

Progress = Callable[[str], None]
_BUDGETS = ("allocated", "reserved", "process")


def plan(
    job: Job,
    device: str = "cpu",
    budget: str | int | None = None,
    *,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    budget_of: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest plan for a job that fits a budget and keeps the results.

    Every plan that is compared has been recorded with its strategies applied; nothing is run.

    Args:
        job: what would be trained; its effective batch size stays.
        device: a name from ``memfit devices``.
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        allow: names of strategies (``"bf16"``), or numerics classes (``"approximate"``), that may
            change the results. Exact and same-in-law ones are always allowed.
        require: names of strategies that the plan must have.
        forbid: names of strategies that the plan may not have.
        budget_of: what the budget bounds, ``allocated``, ``reserved`` or ``process``; by default
            allocated bytes on ``cpu`` and process bytes on a GPU.
        progress: told of every plan that is about to be recorded.

    Raises:
        NoPlanFitsError: if no plan fits, with the smallest peak reached and what holds it.
        UsageError: if the budget or a name makes no sense.
        StrategyError: if a required strategy cannot apply.
    """
    spec = load_device(device)
    budget_bytes = read_budget(budget) or spec.memory_bytes
    budget_of = budget_of or default_budget_of(spec)
    if budget_of not in _BUDGETS:
        raise UsageError(f"A budget bounds one of {', '.join(_BUDGETS)}, not {budget_of!r}.")
    layout = find_layout(job)
    recorded = record(job, Plan(), layout, device=spec)
    choices = gather_choices(recorded.facts, allow, require, forbid)

    def try_out(strategies: Strategies) -> Prediction:
        if progress is not None:
            progress(" + ".join(strategy.label() for strategy in strategies) or "as it is")
        candidate = Plan(strategies=strategies)
        recording = record(job, candidate, layout, device=spec) if strategies else recorded
        return evaluate(
            job, recording, spec, candidate, budget_bytes=budget_bytes, budget_of=budget_of
        )

    search = Search(try_out, choices)
    best = search.run()
    if best is None:
        raise _no_plan_fits(search.smallest(), budget_bytes, choices)
    return Plan(
        strategies=best.strategies,
        device=spec.name,
        numerics=Numerics(best.prediction.numerics),
        prediction=best.prediction,
        considered=considered_plans(search.tried.values(), best),
        refused=choices.refused,
    )


def read_budget(budget: str | int | None) -> int | None:
    """Read a budget in bytes; None stays None.

    Raises:
        UsageError: if it is no size, or not positive.
    """
    if budget is None:
        return None
    try:
        budget_bytes = parse_bytes(budget)
    except ValueError as error:
        raise UsageError(f"The budget {error}.") from None
    if budget_bytes <= 0:
        raise UsageError(f"The budget must be more than 0 bytes, not {budget}.")
    return budget_bytes


def _no_plan_fits(smallest: Candidate, budget_bytes: int, choices: Choices) -> NoPlanFitsError:
    """Say how small it got, and what else could be allowed."""
    remedies = [f"{name} ({reason})" for name, reason in choices.refused if "--allow" in reason]
    advice = ["Raise the budget or reduce the batch size or the model."]
    if remedies:
        advice.append("Not tried, because the results would change: " + "; ".join(remedies) + ".")
    return NoPlanFitsError(
        budget_bytes=budget_bytes,
        smallest_peak_bytes=smallest.prediction.bounded_bytes(),
        by_category=smallest.prediction.by_category,
        strategies=[strategy.label() for strategy in smallest.strategies],
        remedies=advice,
    )
