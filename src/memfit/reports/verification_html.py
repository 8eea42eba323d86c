"""The page of a proof: how far each parameter is from the plain step, under every plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .charts.embedding import charts_of, visible
from .page import page_environment
from .plots import BLUE, CYAN, GREEN, GREY, PURPLE, RED, YELLOW
from .wording import NUMERICS_MEANING, brief_plan

if TYPE_CHECKING:
    from memfit.verification.proof import Verifications
    from memfit.verification.result import Verification

_COLOURS = (BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY)
_FLOOR = 1e-18
"""Below every error that fp64 can show: where an error of exactly zero is drawn."""
_MOST_PARAMETERS = 4000
_MOST_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A figure as it is read and as it is sorted by."""

    text: str
    value: float
    is_above: bool = False
    """Whether it is above the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanRow:
    """One plan: what it claims and earns, and its largest errors."""

    found: Verification
    name: str
    tone: str
    cells: Sequence[_Cell]


def verification_html(proof: Verifications, *, job: str) -> str:
    """Render a proof as one self-contained page.

    Args:
        proof: what is shown.
        job: how the job was named: ``FILE.py:name``.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    names = _names(proof)
    broken, lacking = len(proof.broken), sum(not each.is_proof for each in proof.verifications)
    return page_environment().get_template("verification.html.j2").render(
        proof=proof,
        job=job,
        verdict=_verdict(proof, broken, lacking),
        tone="bad" if broken else "warn" if lacking else "good",
        rows=[_plan_row(found) for found in proof.verifications],
        parameters=_parameter_rows(proof, names)[:_MOST_ROWS],
        num_parameters=len(names),
        meaning=NUMERICS_MEANING,
        notes=_notes(proof),
        charts=charts_of({"errors": _chart(proof, names)}),
    )  # fmt: skip


def _verdict(proof: Verifications, num_broken: int, num_lacking: int) -> str:
    count = len(proof.verifications)
    plans = "1 plan" if count == 1 else f"{count:,} plans"
    if num_broken:
        return f"Of {plans}, {num_broken:,} earned less than claimed."
    if num_lacking:
        return f"{plans[0].upper()}{plans[1:]} ran as claimed; of {num_lacking:,} it is no proof."
    return f"{plans[0].upper()}{plans[1:]} kept what was claimed."


def _names(proof: Verifications) -> list[str]:
    """List the parameters in the order of the model."""
    found: dict[str, None] = {}
    for each in proof.verifications:
        found |= dict.fromkeys((*each.parameter_errors, *each.gradient_errors))
    return list(found)


def _plan_row(found: Verification) -> _PlanRow:
    errors = (
        found.loss_error,
        found.gradient_error,
        found.parameter_error,
        found.buffer_error,
        found.effect_error,
    )
    tone = "" if found.is_proof else "guess"
    return _PlanRow(
        found=found,
        name=brief_plan(found.strategies),
        tone=tone if found.keeps_promise else "no",
        cells=[_cell(error, found.bound) for error in errors],
    )


def _cell(error: float | None, bound: float) -> _Cell:
    if error is None:
        return _Cell(text="-", value=-1.0)
    if not math.isfinite(error):
        return _Cell(text="no number", value=1e308, is_above=True)
    return _Cell(text=f"{error:.1e}" if error else "0", value=error, is_above=error > bound)


def _parameter_rows(
    proof: Verifications, names: Sequence[str]
) -> list[tuple[str, list[_Cell], str]]:
    """Return each parameter, its largest errors and the plan of the gradient's, worst first."""
    rows = []
    for name in names:
        of_gradient = [
            (found.gradient_errors[name], found)
            for found in proof.verifications
            if name in found.gradient_errors
        ]
        of_parameter = [
            (found.parameter_errors[name], found)
            for found in proof.verifications
            if name in found.parameter_errors
        ]
        cells, worst = [], ""
        for errors in (of_gradient, of_parameter):
            error, found = max(errors, key=lambda pair: pair[0], default=(None, None))
            cells.append(_cell(error, found.bound if found else 0.0))
            worst = worst or (brief_plan(found.strategies) if found and error else "")
        rows.append((name, cells, worst))
    return sorted(rows, key=lambda row: -max(cell.value for cell in row[1]))


def _notes(proof: Verifications) -> list[str]:
    own = [note for found in proof.verifications for note in (*found.effects, *found.notes)]
    tried = [f"not tried: {name}: {reason}" for name, reason in proof.failed]
    return [*dict.fromkeys([*proof.notes, *own]), *tried]


def _chart(proof: Verifications, names: Sequence[str]) -> dict[str, Any] | None:
    """Return what the chart of all gradients is drawn from; None where there are none."""
    shown = names[:_MOST_PARAMETERS]
    if not shown or not any(found.gradient_errors for found in proof.verifications):
        return None
    bounds = {found.bound for found in proof.verifications}
    return {
        "names": [visible(name) for name in shown],
        "floor": _FLOOR,
        "bound": bounds.pop() if len(bounds) == 1 else None,
        "plans": [
            {
                "name": visible(brief_plan(found.strategies)),
                "colour": _COLOURS[index % len(_COLOURS)],
                "errors": [_finite(found.gradient_errors.get(name)) for name in shown],
            }
            for index, found in enumerate(proof.verifications)
        ],
    }


def _finite(error: float | None) -> float | None:
    if error is None or not math.isfinite(error):
        return None
    return float(f"{error:.3g}")
