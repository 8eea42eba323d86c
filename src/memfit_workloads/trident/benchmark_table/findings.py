"""What follows from the rows, computed; and the sentences that say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.trace.events import Category
from memfit.units import format_bytes

from .figures import INFRARED, VIDEO, CardFigures, RowFigures
from .rows import (
    ADAPTERS_ONLY,
    ALL_STATES,
    BASELINE,
    BF16,
    CHECKPOINTED,
    DOCUMENT_ROWS,
    EIGHT_BIT,
    FOUR_BIT,
    OFFLOAD,
    REMEDY_ROWS,
    TILED,
)

_LEAST_FRACTION = 0.05
"""Of the baseline's peak: what removes less is not told among what removes bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the rows at the document's size say together."""

    peak_bytes: int
    """Of the baseline, allocated."""
    branch_bytes: Mapping[str, int]
    """What each branch holds at that peak."""
    weights_bytes: int
    states_bytes: int
    saved_bytes: Mapping[str, int]
    """What each remedy removes from the peak of the baseline for as many samples."""
    kept_fraction_under_bf16: float
    """Of what the baseline saves for backward."""
    fitting: tuple[str, ...]
    """The document's rows whose process fits the card."""

    @property
    def removing(self) -> list[str]:
        """Name the remedies that remove bytes, the strongest first."""
        least_bytes = _LEAST_FRACTION * self.peak_bytes
        exact = (name for name, num in self.saved_bytes.items() if num > least_bytes)
        return sorted(exact, key=lambda name: -self.saved_bytes[name])


def findings_of(rows: Sequence[RowFigures]) -> Findings | None:
    """Put together what rows say; None while one that is needed is missing."""
    cards = {row.name: row.card for row in rows if row.card is not None}
    needed = {BASELINE, EIGHT_BIT, OFFLOAD, FOUR_BIT, ALL_STATES, BF16, ADAPTERS_ONLY}
    if not needed <= cards.keys():
        return None
    baseline = cards[BASELINE]
    return Findings(
        peak_bytes=baseline.peak_allocated_bytes,
        branch_bytes=baseline.by_branch,
        weights_bytes=baseline.by_category[Category.PARAMETERS.value],
        states_bytes=baseline.by_category[Category.OPTIMIZER_STATE.value],
        saved_bytes=_saved_bytes(cards),
        kept_fraction_under_bf16=cards[BF16].kept_bytes / baseline.kept_bytes,
        fitting=tuple(
            row.title for row in DOCUMENT_ROWS if row.name in cards and cards[row.name].fits
        ),
    )


def _saved_bytes(cards: Mapping[str, CardFigures]) -> dict[str, int]:
    """Compare remedies of one sample with the baseline."""
    before_bytes = cards[BASELINE].peak_allocated_bytes
    return {
        row.name: before_bytes - cards[row.name].peak_allocated_bytes
        for row in REMEDY_ROWS
        if row.batch_size == 1 and row.name in cards
    }


def sentences(rows: Sequence[RowFigures]) -> Iterator[str]:
    """Say what was found."""
    found = findings_of(rows)
    titles = {row.name: row.title for row in rows}
    if found is not None:
        yield from _of_the_card(found, titles)
    measured = {row.name: row.cpu for row in rows if row.cpu is not None}
    if {BASELINE, CHECKPOINTED, TILED} <= measured.keys():
        worst = max(abs(each.error_fraction) for each in measured.values())
        plain_bytes = measured[BASELINE].peak_allocated_bytes
        recomputed, tiled = (
            _percent(measured[name].peak_allocated_bytes / plain_bytes)
            for name in (CHECKPOINTED, TILED)
        )
        yield (
            f"On the CPU {len(measured)} of {len(rows)} rows were run: predicted peaks are within "
            f"{100 * worst:.2g} % of the measured ones. What single convolutions need inside is "
            f"largest there: tiles leave {tiled} of the plain peak, recomputing {recomputed}."
        )


def _of_the_card(found: Findings, titles: Mapping[str, str]) -> Iterator[str]:
    """Say what was found at the document's size."""
    saved = found.saved_bytes
    video, infrared = (found.branch_bytes[name] / found.peak_bytes for name in (VIDEO, INFRARED))
    yield (
        f"Of the plain peak {_percent(video)} lie in the 3-D U-Net and {_percent(infrared)} in the "
        f"infrared detector, in activations. All weights are {format_bytes(found.weights_bytes)}, "
        f"AdamW's states {format_bytes(found.states_bytes)}."
    )
    yield (
        f"8-bit states remove {format_bytes(saved[EIGHT_BIT])}, states off the device (what "
        f"ZeRO-2 with offload is on one card) {format_bytes(saved[OFFLOAD])}, transformers in 4 "
        f"bits {format_bytes(saved[FOUR_BIT])}; all together {format_bytes(saved[ALL_STATES])}, "
        f"{_percent(saved[ALL_STATES] / found.peak_bytes, 1)} of the peak. A device map could move "
        "no more than the weights."
    )
    remedies = [name for name in found.removing if name != ADAPTERS_ONLY]
    listed = ", ".join(f"{titles[name]} {format_bytes(saved[name])}" for name in remedies)
    yield f"What removes bytes: {listed}; and fewer samples at a time."
    yield (
        f"bf16 leaves {_percent(found.kept_fraction_under_bf16)} of what forward keeps for "
        f"backward, and {_percent(1 - saved[BF16] / found.peak_bytes)} of the peak, not half: "
        "under autocast group norms run in fp32, so they keep an fp32 copy of their input and give "
        "the GELU behind them fp32 to keep; only what convolutions keep is in 16 bits."
    )
    yield (
        f"{len(found.fitting)} of the document's {len(DOCUMENT_ROWS)} rows "
        f"fit the card{_named(found.fitting)}. four-bit-base by itself trains adapters alone, and "
        f"no convolution: that removes {format_bytes(saved[ADAPTERS_ONLY])}, by training something "
        "else."
    )


def _named(titles: Sequence[str]) -> str:
    return f" ({', '.join(titles)})" if titles else ""


def _percent(fraction: float, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f} %"
