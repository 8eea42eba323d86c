"""The page of a run and its pictures, ``report.html`` in its folder, whoever has run it."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.files import write_atomically
from memfit.journal.one_axis import laid_along
from memfit.journal.sentences import drift_sentence
from memfit.peak_changes.parts import kind_of, part_changes
from memfit.units import format_bytes

from .charts.embedding import charts_of
from .charts.frontier_chart import frontier_chart
from .charts.run_charts import metrics_chart, ranks_chart, run_chart
from .charts.step_chart import step_chart
from .page import INLINE_POINTS, TOP_MODULES, PeakPart, page_environment, peak_parts
from .plan_points import plan_points
from .plan_rows import considered_rows
from .plots import png_bytes, svg_text
from .run_contents import RunReport
from .run_plots import (
    allocated_budget,
    has_memory,
    metrics_figure,
    plan_figure,
    plotted_metrics,
    ranks_figure,
    run_figure,
    step_figure,
    step_of_run,
)
from .run_wording import budget_verdict, headline_cards, rank_row, verdict
from .training import Training
from .wording import FIGURE_NAMES, explanation_lines, flat_values, format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_NAME = "report.html"
_MOST_ROWS = 30
_MOST_OPEN = 5
"""So many findings are read at once; the others unfold."""
_MOST_METRIC_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _GaugeBar:
    """One peak as a bar against the budget."""

    label: str
    value: str
    width: float
    """Percent of the gauge."""
    tone: str


def run_html(report: RunReport) -> str:
    """Render a run as one self-contained page.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    template = page_environment().get_template("run.html.j2")
    figures = _figures(report, max_points=INLINE_POINTS)
    if report.training is not None:
        figures |= {"plan-step": plan_figure(report.training, max_points=INLINE_POINTS)}
    if plotted_metrics(report.metrics):
        figures |= {"metrics": metrics_figure(report.metrics)}
    pictures = {
        name: svg_text(figure, prefix=name)
        for name, figure in figures.items()
        if figure is not None
    }
    sentences = []
    for told in report.drifts[:_MOST_ROWS]:
        whose = f"Rank {told.rank}: " if len(report.ranks) > 1 else ""
        sentences.append(f"{whose}{drift_sentence(told.event)}")
    return template.render(
        report=report,
        facts=_facts(report),
        verdict=verdict(report),
        cards=headline_cards(report),
        pictures=pictures,
        steps=[name for name in ("plan-step", "timeline") if name in pictures],
        step_title=shown_step.title if (shown_step := step_of_run(report)) else "",
        charts=charts_of(charts_of_run(report)),
        has_ranks=len(report.ranks) > 1,
        drifts=sentences,
        changes=report.plan_changes(),
        ranks=[rank_row(rank) for rank in report.ranks],
        metric_names=_metric_names(report.metrics),
        metric_rows=_metric_rows(report.metrics),
        num_metrics=len(report.metrics),
        most_rows=_MOST_ROWS,
        most_open=_MOST_OPEN,
        **_training_parts(report),
    )


def write_run_page(report: RunReport) -> list[Path]:
    """Write the page and its pictures into the run folder, and give their paths, the page first.

    All are rendered before any is written.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    page = run_html(report).encode()
    pictures = {
        report.folder / f"{name}.png": png_bytes(figure)
        for name, figure in _figures(report).items()
        if figure is not None
    }
    for path, picture in pictures.items():
        write_atomically(path, picture)
    write_atomically(report.folder / PAGE_NAME, page)
    return [report.folder / PAGE_NAME, *pictures]


def _figures(report: RunReport, *, max_points: int = 4000) -> dict[str, Figure | None]:
    """Draw what there is to draw, by the name of its file."""
    return {
        "run-peaks": run_figure(report, max_points=max_points) if has_memory(report) else None,
        "timeline": step_figure(report, max_points=max_points),
        "run-ranks": ranks_figure(report),
    }


def charts_of_run(report: RunReport) -> dict[str, dict[str, Any] | None]:
    """Gather the data of the charts that take the place of the pictures, by the same names."""
    training = report.training
    charts: dict[str, dict[str, Any] | None] = {
        "run-peaks": run_chart(report),
        "metrics": metrics_chart(report.metrics, plotted_metrics(report.metrics)),
        "run-ranks": ranks_chart(report),
        "timeline": None,
        "plan-step": None,
    }
    step = step_of_run(report)
    if step is not None:
        predicted, measured = step.predicted, step.measured
        if predicted is not None and measured is not None:
            measured = laid_along(measured, predicted)
        charts["timeline"] = step_chart(
            measured or predicted,
            predicted if measured else None,
            names=("measured", "predicted") if measured else ("predicted", ""),
            budget_bytes=step.budget_bytes,
        )
    if training is not None:
        charts["frontier"] = frontier_chart(
            plan_points(training.considered),
            budget_bytes=training.budget_bytes,
            figure_name=FIGURE_NAMES[training.planned.budget_of],
        )
    if training is not None and training.planned.strategies:
        charts["plan-step"] = step_chart(
            training.planned.timeline,
            training.plain.timeline,
            names=("planned", "plain"),
            budget_bytes=allocated_budget(training),
        )
    return charts


def _facts(report: RunReport) -> list[tuple[str, str]]:
    found = [("Folder", str(report.folder))]
    if report.facts is not None:
        facts = report.facts
        started = facts.started_at.replace("T", " ").partition(".")[0]
        found = [("Device", facts.device), ("Started", started), ("Process", str(facts.process_id))]
        if facts.host_name:
            found.append(("Host", facts.host_name))
        if facts.num_ranks > 1:
            found.append(("Ranks", f"{facts.num_ranks:,}"))
    if report.training is not None:
        planned = report.training.planned
        found += [
            ("Effective batch size", f"{planned.batch_size:,}"),
            ("Numerics", planned.numerics),
        ]
    return found


def _training_parts(report: RunReport) -> dict[str, Any]:
    """Prepare what is shown of a training beside its journal; nothing for other runs."""
    training = report.training
    if training is None:
        return {"training": None}
    plain, planned = training.plain, training.planned
    whole_bytes = planned.peak_allocated_bytes
    return {
        "training": training,
        "budget_verdict": budget_verdict(training),
        "gauge": _gauge(training),
        "budget_width": _budget_width(training),
        "explanation": explanation_lines(
            plain, planned, budget_bytes=training.budget_bytes, rows=training.considered
        ),
        "considered": considered_rows(training.considered),
        "categories": peak_parts(planned.by_category, whole_bytes, plain=plain.by_category),
        "modules": _module_parts(plain.by_module, planned.by_module, whole_bytes),
        "results": flat_values(training.results),
        "shown": [
            (name.removesuffix(".png"), _data_address(path.read_bytes()))
            for name in training.pictures
            if (path := report.folder / name).exists()
        ],
    }


def _module_parts(
    plain: Mapping[str, int], planned: Mapping[str, int], whole_bytes: int
) -> list[PeakPart]:
    """Set modules of both steps beside each other; of many those of one kind in one row."""
    rows = part_changes(plain, planned)
    names = {row.name: row.name for row in rows}
    if len(rows) > TOP_MODULES:
        kinds = Counter(kind_of(name) for name in names)
        for name in names:
            kind = kind_of(name)
            names[name] = f"{kind} ({kinds[kind]:,} modules)" if kinds[kind] > 1 else name
    sides: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for row in rows:
        sides[0][names[row.name]] += row.before_bytes
        sides[1][names[row.name]] += row.after_bytes
    return peak_parts(sides[1], whole_bytes, plain=sides[0], limit=TOP_MODULES)


def _data_address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _peaks(training: Training) -> dict[str, int]:
    """Return the peaks that the gauge compares."""
    peaks = {
        "plain": training.plain.bounded_bytes(),
        "planned": training.planned.bounded_bytes(),
    }
    return peaks if training.found_bytes is None else {**peaks, "measured": training.found_bytes}


def _gauge_bytes(training: Training) -> int:
    """Return the bytes at the right end of the gauge."""
    return max(1, *_peaks(training).values(), training.budget_bytes or 0)


def _gauge(training: Training) -> list[_GaugeBar]:
    """Set the peaks against the budget as bars."""
    whole, budget_bytes = _gauge_bytes(training), training.budget_bytes
    return [
        _GaugeBar(
            label=label,
            value=format_bytes(peak),
            width=round(100 * peak / whole, 2),
            tone="over" if budget_bytes and peak > budget_bytes else label,
        )
        for label, peak in _peaks(training).items()
    ]


def _budget_width(training: Training) -> float | None:
    """Return the place of the budget on the gauge, in percent."""
    if not training.budget_bytes:
        return None
    return round(100 * training.budget_bytes / _gauge_bytes(training), 2)


def _metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the columns of the metrics in the order in which they first occur."""
    return list(dict.fromkeys(name for row in metrics for name in row))


def _metric_rows(metrics: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the metrics as text, a dash where an epoch has no such value; of many the last."""
    names = _metric_names(metrics)
    shown = metrics[-_MOST_METRIC_ROWS:]
    return [[format_value(name, row.get(name)) for name in names] for row in shown]
