"""The timeline of one step of a run, as a file: ``timeline.json``.

The arrays of a long step are thinned before they are written, so that the file stays small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.figures import Timeline
from memfit.files import write_atomically

from .folder import TIMELINE_NAME
from .one_axis import laid_along
from .plain_text import parsed_json, read_written

_VERSION = 1
_MOST_POINTS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The measured timeline of one step, and the predicted one where there is one."""

    step: int
    """Counted from 1."""
    measured: Timeline
    predicted: Timeline | None = None


def write_timeline(folder: Path, timeline: StepTimeline) -> Path:
    """Write the timeline of a step into a run folder, and give the path of the file."""
    path = folder / TIMELINE_NAME
    measured, predicted = timeline.measured, timeline.predicted
    if predicted is not None:
        measured = laid_along(measured, predicted)
    content = {
        "memfit_timeline": _VERSION,
        "step": timeline.step,
        "measured": timeline_json(measured),
        "predicted": None if predicted is None else timeline_json(predicted),
    }
    write_atomically(path, json.dumps(content) + "\n")
    return path


def read_timeline(folder: Path) -> StepTimeline | None:
    """Read the timeline in a run folder; None where there is none.

    Raises:
        DataError: if the file is something else.
    """
    path = folder / TIMELINE_NAME
    if not path.exists():
        return None
    try:
        content = parsed_json(read_written(path))
        if content["memfit_timeline"] != _VERSION:
            raise DataError(str(path), f"it does not say memfit_timeline: {_VERSION}")
        predicted = content["predicted"]
        return StepTimeline(
            step=int(content["step"]),
            measured=timeline_from_json(content["measured"]),
            predicted=None if predicted is None else timeline_from_json(predicted),
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is no timeline of a step ({type(error).__name__}: {error})"
        raise DataError(str(path), reason) from error


def kept_events(allocated_bytes: Sequence[float], max_points: int) -> list[int]:
    """Choose at most ``max_points`` events: the lowest and the highest of every segment.

    The first and the last event stay as well, so that the picture begins and ends where the step
    does; the highest event of all is the highest of its segment and is always kept.
    """
    count = len(allocated_bytes)
    if count <= max_points:
        return list(range(count))
    segments = max(1, (max_points - 2) // 2)
    kept = {0, count - 1}
    for segment in range(segments):
        events = range(segment * count // segments, (segment + 1) * count // segments)
        kept.add(max(events, key=allocated_bytes.__getitem__))
        kept.add(min(events, key=allocated_bytes.__getitem__))
    return sorted(kept)


def downsample(timeline: Timeline, max_points: int) -> Timeline:
    """Thin a timeline to at most ``max_points`` events, keeping its maxima.

    Phases move to the first kept event at or after the one they began with.
    """
    kept = kept_events(timeline.allocated_bytes, max_points)
    if len(kept) == len(timeline.allocated_bytes):
        return timeline
    phases, position = [], 0
    for event, name in timeline.phases:
        while position < len(kept) - 1 and kept[position] < event:
            position += 1
        phases.append((position, name))
    places = timeline.axis()
    return Timeline(
        allocated_bytes=[timeline.allocated_bytes[event] for event in kept],
        by_category={
            name: [values[event] for event in kept] for name, values in timeline.by_category.items()
        },
        phases=phases,
        places=[places[event] for event in kept],
    )


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as plain JSON values, thinned."""
    thinned = downsample(timeline, _MOST_POINTS)
    parts = {name: list(values) for name, values in thinned.by_category.items() if any(values)}
    return {
        "allocated_bytes": list(thinned.allocated_bytes),
        "by_category": parts,
        "phases": [[event, str(name)] for event, name in thinned.phases],
        "places": list(thinned.places),
    }


def timeline_from_json(content: Mapping[str, Any]) -> Timeline:
    """Read what `timeline_json` gives."""
    totals = [int(value) for value in content["allocated_bytes"]]
    parts = {str(name): list(map(int, part)) for name, part in content["by_category"].items()}
    places = [float(place) for place in content.get("places") or ()]
    if any(len(part) != len(totals) for part in (*parts.values(), places or totals)):
        msg = "its categories or places are not as long as its total"
        raise ValueError(msg)
    phases = [(int(event), str(name)) for event, name in content["phases"]]
    return Timeline(allocated_bytes=totals, by_category=parts, phases=phases, places=places or ())
