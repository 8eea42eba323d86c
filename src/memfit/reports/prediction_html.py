"""The page and the picture of one prediction: a single file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.figures import Advice, Certainty, Prediction
from memfit.prediction.lives import Life
from memfit.units import format_bytes, format_seconds

from .charts.embedding import charts_of
from .charts.step_chart import step_chart
from .page import INLINE_POINTS, TONES, Headline, module_parts, page_environment, peak_parts
from .plots import svg_text, timeline_figure
from .wording import (
    advice_sentence,
    fits_sentence,
    interval_words,
    is_uncertain,
    place_words,
    process_certainty,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memfit.script.prediction import PhasePeak


def prediction_picture(prediction: Prediction, *, max_points: int = 4000) -> Figure:
    """Draw the memory of one predicted step by category.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    return timeline_figure(
        prediction.timeline,
        None,
        budget_bytes=_allocated_budget(prediction),
        title=f"One step on {place_words(prediction)}, predicted",
        names=("allocated bytes by category", ""),
        max_points=max_points,
    )


def prediction_html(
    prediction: Prediction,
    advice: Sequence[Advice],
    *,
    job: str,
    lives: Sequence[Life] = (),
    phases: Sequence[PhasePeak] = (),
) -> str:
    """Render a prediction as one self-contained page.

    Args:
        prediction: what is shown.
        advice: what would change it.
        job: how the step was named: ``FILE.py:name``.
        lives: which blocks live when; without them no moment tells who holds its bytes.
        phases: of a script's run.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    template = page_environment().get_template("prediction.html.j2")
    peak_bytes = prediction.peak_allocated_bytes
    chart = step_chart(
        prediction.timeline,
        names=("allocated", ""),
        budget_bytes=_allocated_budget(prediction),
        lives=lives,
    )
    return template.render(
        prediction=prediction,
        charts=charts_of({"step": chart}),
        phases=phases,
        has_lives=chart is not None and bool(lives),
        job=job,
        tone="" if is_uncertain(prediction) else TONES[prediction.fits],
        verdict=fits_sentence(prediction, prediction.budget_bytes),
        cards=_cards(prediction),
        picture=svg_text(
            prediction_picture(prediction, max_points=INLINE_POINTS), prefix="timeline"
        ),
        advice=[advice_sentence(entry) for entry in advice],
        categories=peak_parts(prediction.by_category, peak_bytes),
        modules=module_parts(prediction.by_module, peak_bytes),
    )


def _allocated_budget(prediction: Prediction) -> int | None:
    """Return the budget where it bounds what a timeline shows."""
    return prediction.budget_bytes if prediction.budget_of == "allocated" else None


def _cards(prediction: Prediction) -> list[Headline]:
    """Choose the headline numbers, each with its interval and how it is known."""
    cards = [
        _figure_card(prediction, "allocated", "Peak allocated", prediction.certainty),
        _figure_card(prediction, "reserved", "Peak reserved", prediction.certainty),
        _figure_card(prediction, "process", "Process", process_certainty(prediction)),
    ]
    if prediction.smallest_memory_bytes is not None:
        cards.append(
            Headline(
                label="Survives in",
                value=format_bytes(prediction.smallest_memory_bytes),
                notes=(
                    "least card memory",
                    f"{100 * prediction.fragmentation_fraction:.1f} % of reserved unused",
                ),
            )
        )
    seconds = format_seconds(prediction.step_seconds)
    cards.append(Headline(label="Step time", value=seconds, notes=("roofline", "estimate")))
    return cards


def _figure_card(prediction: Prediction, figure: str, label: str, certainty: Certainty) -> Headline:
    """Show one figure with its interval."""
    interval = interval_words(prediction.intervals.get(figure))
    return Headline(
        label=label,
        value=format_bytes(prediction.bounded_bytes(figure)),
        notes=tuple(note for note in (interval, certainty.value) if note),
    )
