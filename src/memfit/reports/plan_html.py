"""The page of a plan: one file with the trade of memory against time, and what each plan is."""

from __future__ import annotations

from memfit.figures import Prediction
from memfit.planner.result.planning_result import PlanningResult
from memfit.units import format_bytes, format_seconds

from .charts.embedding import charts_of
from .charts.frontier_chart import frontier_chart
from .charts.step_chart import step_chart
from .page import INLINE_POINTS, TONES, Headline, module_parts, page_environment, peak_parts
from .pareto_plot import pareto_figure
from .plan_points import plan_points
from .plan_rows import (
    chosen_row,
    curve,
    is_measured,
    plain_row,
    predicted,
    refusals,
    remedy_rows,
)
from .plots import svg_text, timeline_figure
from .wording import FIGURE_NAMES, change, fits_sentence, is_uncertain, place_words


def check_can_render() -> None:
    """Find out before a long search whether a page can be written.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    page_environment()
    timeline_figure(None, None)


def plan_html(plan: PlanningResult, *, job: str) -> str:
    """Render a plan and what lies around it as one self-contained page.

    Args:
        plan: what was found.
        job: how the job was named: ``FILE.py:name``.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    prediction = predicted(plan)
    points = plan_points(plan.considered, curve(plan), budget_bytes=prediction.budget_bytes)
    bounds_allocated = prediction.budget_of == "allocated"
    budget_bytes = prediction.budget_bytes if bounds_allocated else None
    peak_bytes = prediction.peak_allocated_bytes
    step = timeline_figure(
        prediction.timeline, None, budget_bytes=budget_bytes, max_points=INLINE_POINTS,
        title=f"One step on {place_words(prediction)} under the plan", names=("allocated", ""),
    )  # fmt: skip
    frontier = frontier_chart(
        points, budget_bytes=prediction.budget_bytes, figure_name=FIGURE_NAMES[prediction.budget_of]
    )
    charts = {
        "frontier": frontier,
        "step": step_chart(prediction.timeline, names=("allocated", ""), budget_bytes=budget_bytes),
    }
    return page_environment().get_template("plan.html.j2").render(
        plan=plan,
        job=job,
        prediction=prediction,
        tone="" if is_uncertain(prediction) else TONES[prediction.fits],
        verdict=fits_sentence(prediction, prediction.budget_bytes),
        cards=_cards(plan, prediction),
        charts=charts_of(charts),
        points=points,
        num_more=len(plan.considered) - sum(point.is_recorded for point in points),
        is_measured=is_measured(plan),
        picture=svg_text(pareto_figure(plan), prefix="frontier") if frontier else "",
        step=svg_text(step, prefix="step") if prediction.timeline else "",
        ladder=[
            (
                format_bytes(predicted(rung).bounded_bytes()),
                format_seconds(predicted(rung).step_seconds),
                rung.labels(),
            )
            for rung in plan.ladder
        ],
        remedies=remedy_rows(plan),
        refusals=refusals(plan),
        categories=peak_parts(prediction.by_category, peak_bytes),
        modules=module_parts(prediction.by_module, peak_bytes),
    )  # fmt: skip


def _cards(plan: PlanningResult, prediction: Prediction) -> list[Headline]:
    """Choose the headline numbers, beside those of the plain step where it is known."""
    plain, chosen = plain_row(plan.considered), chosen_row(plan.considered)
    peak_bytes = prediction.bounded_bytes()
    seconds = prediction.step_seconds if chosen is None else chosen.step_seconds
    peak_notes, time_notes = [prediction.certainty.value], []
    if plain is not None and plain.strategies != (chosen.strategies if chosen else ()):
        peak_notes.append(f"plain {format_bytes(plain.peak_bytes)}")
        time_notes += [f"plain {format_seconds(plain.step_seconds)}"]
        time_notes += [change(seconds, plain.step_seconds)]
    time_notes.append("measured" if is_measured(plan) else "estimate")
    name = FIGURE_NAMES[prediction.budget_of].capitalize()
    budget = prediction.budget_bytes
    return [
        Headline(label=name, value=format_bytes(peak_bytes), notes=tuple(peak_notes)),
        Headline(label="Step time", value=format_seconds(seconds), notes=tuple(time_notes)),
        Headline(
            label="Budget",
            value="none" if budget is None else format_bytes(budget),
            notes=(f"of {FIGURE_NAMES[prediction.budget_of]}",),
        ),
    ]
