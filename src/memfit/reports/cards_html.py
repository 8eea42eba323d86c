"""The page of one step on several devices: a single file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.devices.spec import CPU
from memfit.prediction.compared_cards import ComparedCard
from memfit.units import format_bytes, format_seconds

from .cards_text import (
    batch_words,
    card_notes,
    figure_names,
    fits_cell,
    fits_words,
    interval_of,
    needed_words,
    seconds_words,
)
from .charts.embedding import charts_of
from .charts.frontier_chart import cards_chart
from .page import TONES, Headline, page_environment
from .wording import verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One device as the page writes it."""

    card: ComparedCard
    room: str
    needed: str
    interval: str
    fits: str
    tone: str
    seconds: str
    batch: str
    used_fraction: float
    """What is needed, as a part of the memory; 1 where it is more."""
    is_over: bool


def cards_html(
    cards: Sequence[ComparedCard], *, job: str, failures: Mapping[str, str] | None = None
) -> str:
    """Render several devices as one self-contained page.

    Args:
        cards: the devices, those first that are shown first.
        job: how the step was named.
        failures: why there is no answer for a device, by its name.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    first = cards[0].prediction
    best = first if first.fits else None
    template = page_environment().get_template("cards.html.j2")
    return template.render(
        job=job,
        prediction=first,
        verdict=fits_words(cards),
        tone=TONES[any(each.prediction.fits for each in cards)],
        headlines=_headlines(cards, best is not None),
        charts=charts_of({"frontier": cards_chart(cards), "cards": {}}),
        has_chart=cards_chart(cards) is not None,
        figure=figure_names(cards),
        rows=[_row(each) for each in cards],
        has_batch=any(each.largest_batch for each in cards),
        notes=card_notes(cards),
        failures=failures or {},
    )


def _headlines(cards: Sequence[ComparedCard], has_best: bool) -> list[Headline]:
    """Name the fastest device, the one with the least memory, and what the step needs."""
    needed = [each.needed_bytes for each in cards if each.prediction.device != CPU]
    needed = needed or [each.needed_bytes for each in cards]
    low, high = format_bytes(min(needed)), format_bytes(max(needed))
    found = [Headline(label="Needs", value=low, notes=(f"to {high}",) if high != low else ())]
    if not has_best:
        return found
    fitting = [each for each in cards if verdict(each.prediction) == "yes"] or [cards[0]]
    least = min(fitting, key=lambda each: each.memory_bytes)
    for label, card in (("Fastest", fitting[0]), ("Least memory", least)):
        seconds = format_seconds(card.prediction.step_seconds)
        memory = format_bytes(card.memory_bytes)
        notes = (f"{seconds} a step", f"of {memory}")
        found.append(Headline(label=label, value=card.prediction.device, notes=notes))
    return found


def _row(card: ComparedCard) -> CardRow:
    prediction = card.prediction
    word = verdict(prediction)
    return CardRow(
        card=card,
        room=format_bytes(card.memory_bytes),
        needed=needed_words(card),
        interval=interval_of(card),
        fits=fits_cell(card),
        tone={"yes": "yes", "no": "no", "uncertain": "guess"}.get(word, "quiet"),
        seconds=seconds_words(card),
        batch=batch_words(card),
        used_fraction=min(1.0, card.needed_bytes / card.memory_bytes),
        is_over=prediction.fits is False,
    )
