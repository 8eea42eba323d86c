"""The page of a step recorded in advance at many places: one file that needs no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.prediction.recorded_table import Cell

from .page import TONES, PeakPart, page_environment, peak_parts
from .table_text import (
    bytes_words,
    figure_name,
    fits_words,
    largest_words,
    missing_words,
    seconds_words,
)
from .wording import verdict

_TONES = {"yes": "yes", "no": "no", "uncertain": "guess"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place of the table as the page writes it."""

    cell: Cell
    number: int
    num_words: str
    """What the budget bounds, in words."""
    seconds_words: str
    fits: str
    tone: str
    neighbours: dict[str, int]
    """The numbers of the places beside it, by what is done to get there."""
    categories: Sequence[PeakPart]


def table_html(cells: Sequence[Cell], *, job: str, device: str) -> str:
    """Render a table as one self-contained page, in which a click on a place opens it.

    Args:
        cells: the places; those of one plan and setting follow each other.
        job: how the job was named.
        device: where it would run.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    sizes = list(dict.fromkeys(cell.batch_size for cell in cells))
    columns = [cells[start : start + len(sizes)] for start in range(0, len(cells), len(sizes))]
    places = [_place(cells, number, len(sizes)) for number in range(len(cells))]
    rows = [
        (size, [places[column * len(sizes) + row] for column in range(len(columns))])
        for row, size in enumerate(sizes)
    ]
    template = page_environment().get_template("table.html.j2")
    return template.render(
        job=job,
        device=device,
        verdict=largest_words(cells),
        tone=TONES[any(cell.prediction is not None and cell.prediction.fits for cell in cells)],
        figure=figure_name(cells),
        heads=[_head(column[0]) for column in columns],
        rows=rows,
        places=places,
        missing=missing_words(cells),
    )


def _head(cell: Cell) -> list[str]:
    """Write what a column has in common, a line each."""
    return [cell.plan, *(f"{name} {value}" for name, value in cell.settings.items())]


def _place(cells: Sequence[Cell], number: int, height: int) -> Place:
    cell = cells[number]
    found = cell.prediction
    row = number % height
    beside = {
        "smaller batch": number - 1 if row else None,
        "larger batch": number + 1 if row + 1 < height else None,
        "column before": number - height,
        "column after": number + height,
    }
    return Place(
        cell=cell,
        number=number,
        num_words=bytes_words(cell),
        seconds_words=seconds_words(cell),
        fits=fits_words(cell),
        tone="quiet" if found is None else _TONES.get(verdict(found), "quiet"),
        neighbours={
            name: place
            for name, place in beside.items()
            if place is not None and 0 <= place < len(cells)
        },
        categories=[]
        if found is None
        else peak_parts(found.by_category, found.peak_allocated_bytes),
    )
