"""A plan for a terminal: what it is, what it was chosen from, and what lies around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.figures import ConsideredPlacement, ConsideredPlan, ParetoPoint, RefusalKind
from memfit.planner.result.planning_result import PlanningResult
from memfit.units import format_bytes, format_seconds

from .plan_rows import (
    LargerBudget,
    RemedyRow,
    chosen_row,
    considered_rows,
    curve,
    is_measured,
    larger_budgets,
    plain_row,
    predicted,
    refusals,
    remedy_rows,
    spread_out,
    with_chosen_time,
)
from .prediction_text import prediction_table
from .terminal import (
    INDENT,
    Bar,
    Fitted,
    amount,
    at_page_width,
    dashed,
    folded,
    grid,
    section,
    word,
    yes_or_no,
)
from .wording import change, instead_of, percent, plan_name

_NAME_WIDTH = 46
_BOUND = (
    "recorded: alone, in its strongest setting. at most: what lies at that peak of the kinds that "
    "it acts on; another moment of the step may then hold the peak."
)
_MEASURED = "The fastest plans were run here. The other times, here and below, are estimates."
_ALLOW = "--allow NAME admits a strategy that changes the results."


def plan_report(plan: PlanningResult) -> RenderableType:
    """Show the chosen plan, then the others, the trade, safer plans and the remedies."""
    prediction = predicted(plan)
    # What holds the peak in detail is the matter of `memfit predict --plan`.
    parts: list[RenderableType] = [prediction_table(replace(prediction, by_module={}, largest=()))]
    parts += [Padding(Text(reason), INDENT) for reason in plan.reasons]
    parts += [*_placements(plan), "", plan_table(with_chosen_time(plan))]
    if is_measured(plan):
        parts.append(Text(_MEASURED, style="dim"))
    points = curve(plan)
    if len(points) > 1:
        parts += ["", _curve_section(plan, points)]
    if plan.ladder:
        parts.append(section("Safer plans, should it not fit after all", _ladder_table(plan)))
    if plan.approximations:
        table = _approximation_table(plan)
        parts.append(section("What one approximation would buy, recorded", table))
    if plan.remedies:
        parts.append(_remedy_section(plan))
    if refused := refusals(plan):
        sentences = [
            Text.assemble((f"{', '.join(names)}: ", "bold"), reason)
            for reason, names in refused.items()
        ]
        parts.append(section("Left out", dashed(sentences)))
    # The prediction above has said its own.
    if notes := [Text(note) for note in plan.notes if note not in prediction.notes]:
        parts.append(section("Good to know", dashed(notes)))
    return at_page_width(*parts)


def _placements(plan: PlanningResult) -> list[RenderableType]:
    return ["", placement_table(plan.placements)] if plan.placements else []


def placement_table(placements: Sequence[ConsideredPlacement]) -> RenderableType:
    """Show the ways to share the step among ranks, the chosen one marked."""
    figures = ("ranks", "peak", "step", "ranks x step")
    table = grid(word(), *map(amount, figures), word("fits"), folded("plan"))
    for row in placements:
        table.add_row(
            ">" if row.chosen else "",
            f"{row.ranks}",
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "" if row.step_seconds is None else format_seconds(row.step_seconds),
            "" if row.device_seconds is None else format_seconds(row.device_seconds),
            yes_or_no(row.fits),
            Fitted(partial(_placed, row), _NAME_WIDTH),
        )
    title = "Placements considered (> chosen: the least ranks x step); peaks are of one rank"
    return at_page_width(Text(title, style="bold"), table)


def plan_table(considered: Sequence[ConsideredPlan]) -> RenderableType:
    """Show the considered plans that tell most, the chosen one marked, each with its reason."""
    chosen = considered_rows(considered)
    table = grid(word(), amount("peak"), amount("step"), word("fits"), folded("plan"))
    for row in chosen.rows:
        table.add_row(
            ">" if row.chosen else "",
            format_bytes(row.peak_bytes),
            format_seconds(row.step_seconds),
            yes_or_no(row.fits),
            Fitted(partial(_named, row), _NAME_WIDTH),
        )
    parts: list[RenderableType] = [Text("Plans considered (> chosen)", style="bold"), table]
    if chosen.num_more:
        parts.append(Text(f"{chosen.num_more} more were recorded; --json has them.", style="dim"))
    return at_page_width(*parts)


def _placed(row: ConsideredPlacement, width: int) -> Text:
    """Name a plan for ranks, or say why there is none."""
    name = plan_name(row.strategies, width=width)
    said = name if row.fits else f"{row.parallel or 'none'}: {row.reason}"
    return Text(said, style="bold" if row.chosen else "")


def _named(row: ConsideredPlan, width: int) -> Text:
    """Name a plan; below it what became of it, and its numerics where they are not exact."""
    name = Text(plan_name(row.strategies, width=width), style="bold" if row.chosen else "")
    numerics = "" if row.numerics == "exact" else row.numerics
    if note := ", ".join(part for part in (row.reason, numerics) if part):
        name.append(f"\n{note}", style="not bold dim")
    return name


def _curve_section(plan: PlanningResult, points: Sequence[ParetoPoint]) -> RenderableType:
    """Show memory against time, and what a larger budget would buy."""
    budget_bytes = predicted(plan).budget_bytes or 0
    shown = spread_out(points)
    title = f"Memory against time (> chosen; budget {format_bytes(budget_bytes)})"
    parts: list[RenderableType] = [Text(title, style="bold"), _curve_table(plan, shown)]
    if len(shown) < len(points):
        rest = f"{len(points) - len(shown)} more points; --json has them, --pareto draws them."
        parts.append(Text(rest, style="dim"))
    if not is_measured(plan):
        sentences = [_budget_sentence(each) for each in larger_budgets(points, budget_bytes)]
        if points[0].is_chosen:
            sentences = ["No larger budget is known to make the step faster."]
        parts.append(dashed([Text(sentence) for sentence in sentences]))
    return Group(*parts)


def _curve_table(plan: PlanningResult, points: Sequence[ParetoPoint]) -> Table:
    """Show points of the trade, with a bar of each peak."""
    plain = plain_row(plan.considered)
    highest = max(point.peak_bytes for point in points)
    figures = ("peak", "step") if plain is None else ("peak", "step", "to plain")
    table = grid(word(), *map(amount, figures), word(), word("known"))
    for point in points:
        to_plain = [] if plain is None else [change(point.step_seconds, plain.step_seconds)]
        table.add_row(
            ">" if point.is_chosen else "",
            format_bytes(point.peak_bytes),
            format_seconds(point.step_seconds),
            *to_plain,
            Bar(point.peak_bytes / highest),
            Text("recorded" if point.is_recorded else "estimated", style="dim"),
            style="bold" if point.is_chosen else "",
        )
    return table


def _budget_sentence(larger: LargerBudget) -> str:
    point = larger.point
    return (
        f"With {larger.more} more ({format_bytes(larger.budget_bytes)}) a step would take "
        f"{format_seconds(point.step_seconds)}, {100 * larger.saved_fraction:.1f} % less, "
        f"{instead_of(point.strategies, larger.chosen.strategies)}."
    )


def _ladder_table(plan: PlanningResult) -> Table:
    """Show ever smaller plans, with their time beside the chosen one's."""
    table = grid(*map(amount, ("peak", "step", "to chosen")), folded("plan"))
    chosen = chosen_row(plan.considered)
    chosen_seconds = predicted(plan).step_seconds if chosen is None else chosen.step_seconds
    for rung in plan.ladder:
        prediction = predicted(rung)
        table.add_row(
            format_bytes(prediction.bounded_bytes()),
            format_seconds(prediction.step_seconds),
            change(prediction.step_seconds, chosen_seconds),
            Fitted(partial(_rung, rung.labels()), _NAME_WIDTH),
        )
    return table


def _rung(labels: Sequence[str], width: int) -> Text:
    return Text(plan_name(labels, width=width))


def _approximation_table(plan: PlanningResult) -> Table:
    """Show what the chosen plan would take with each approximation, beside what it takes."""
    table = grid(word("with"), *map(amount, ("peak", "to chosen", "step", "to chosen")))
    prediction = predicted(plan)
    for each in plan.approximations:
        table.add_row(
            Text(f"--allow {each.allow}"),
            format_bytes(each.peak_bytes),
            change(each.peak_bytes, prediction.bounded_bytes()),
            format_seconds(each.step_seconds),
            change(each.step_seconds, prediction.step_seconds),
        )
    return table


def _remedy_section(plan: PlanningResult) -> RenderableType:
    """Show what each strategy could take off the peak, so that nobody tunes what holds little."""
    plain = plain_row(plan.considered)
    of = "the plain step's peak allocated"
    whole_bytes = 0
    if plain is not None and predicted(plan).budget_of == "allocated":
        whole_bytes = plain.peak_bytes
        of += f" of {format_bytes(whole_bytes)}"
    rows = remedy_rows(plan)
    shown = {row.strategy for row in rows}
    not_allowed = (each for each in plan.refused if each.kind is RefusalKind.NOT_ALLOWED)
    notes = [_BOUND, *([_ALLOW] if any(each.strategy in shown for each in not_allowed) else [])]
    table = _remedy_table(rows, whole_bytes)
    body = Group(table, Text("\n".join(notes), style="dim"))
    return section(f"What each strategy could take off {of}", body)


def _remedy_table(rows: Sequence[RemedyRow], whole_bytes: int) -> Table:
    """Show remedies, with their shares where the whole peak is known."""
    shares = [amount()] if whole_bytes else []
    table = grid(word(), amount(), *shares, word(), Column())
    for row in rows:
        share = [percent(row.most_bytes, whole_bytes)] if whole_bytes else []
        style = "" if row.state == "used" else "dim"
        table.add_row(
            Text(row.strategy),
            format_bytes(row.most_bytes),
            *share,
            Text(row.known, style="dim"),
            Text(row.state, style=style),
        )
    return table
