"""Reads what a user names to be compared: a saved prediction, or the folder of a run."""

from __future__ import annotations

from pathlib import Path

from memfit.errors import DataError
from memfit.figures import Timeline
from memfit.peak_changes.saved import read_prediction
from memfit.peak_changes.sides import Kind, Side, side_of

from .run_contents import RunReport, read_report


def read_side(path: Path, source: str) -> Side:
    """Read a saved prediction or a run folder.

    Args:
        path: the file or the folder.
        source: what it is called in the comparison.

    Raises:
        DataError: if it is neither, or malformed.
    """
    if path.is_dir():
        return _side_of_run(read_report(path), source)
    return side_of(read_prediction(path), source)


def _side_of_run(report: RunReport, source: str) -> Side:
    """Return what a run has measured; its training adds what was predicted by module.

    Raises:
        DataError: if no peak was measured.
    """
    allocated, host = report.peak_allocated_bytes, report.highest_rank.host_peak_bytes
    peak_bytes = allocated if allocated is not None else host
    if peak_bytes is None:
        reason = "the run has measured no peak of memory yet, so there is nothing to compare"
        raise DataError(str(report.folder), reason)
    facts, planned = report.facts, report.training and report.training.planned
    reserved = [rank.peak_reserved_bytes for rank in report.ranks if rank.peak_reserved_bytes]
    return Side(
        source=source,
        title=report.title,
        kind=Kind.MEASURED,
        device=facts.device if facts else "",
        peaks={"run": peak_bytes},
        figures={
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": max(reserved, default=None),
            "predicted_peak_bytes": report.highest_rank.predicted_peak_bytes,
            "host_peak_bytes": host,
        },
        peak_of="host" if allocated is None else "allocated",
        step_seconds=report.highest_rank.median_step_seconds,
        batch_size=planned.batch_size if planned else None,
        ranks=facts.num_ranks if facts else 1,
        strategies=report.begun_with,
        by_category=_measured_categories(report),
        by_module=planned.by_module if planned else {},
        budget_bytes=report.budget_bytes,
        fits=None if report.budget_bytes is None else peak_bytes <= report.budget_bytes,
    )


def _measured_categories(report: RunReport) -> dict[str, int]:
    """Return what lay at the measured peak, by category; empty where that was not noted."""
    measured = report.training and report.training.measured
    if measured:
        return dict(measured.by_category)
    return {} if report.timeline is None else _at_highest(report.timeline.measured)


def _at_highest(timeline: Timeline) -> dict[str, int]:
    """Return the categories where a timeline is highest."""
    totals = timeline.allocated_bytes
    highest = max(range(len(totals)), key=totals.__getitem__, default=0)
    return {name: values[highest] for name, values in timeline.by_category.items() if values}
