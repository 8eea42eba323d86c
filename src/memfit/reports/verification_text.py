"""The report of a proof for a terminal: what plans claim, what they earned, where they are off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from .terminal import INDENT, PLAN_WIDTH, amount, at_page_width, folded, grid, word
from .wording import plan_name

if TYPE_CHECKING:
    from memfit.verification.proof import Verifications
    from memfit.verification.result import Verification


def proof_table(proof: Verifications) -> RenderableType:
    """Show each verified plan with its largest error, then notes."""
    table = grid(folded("plan"), *map(word, ("claims", "earned", "in")), amount("error"))
    for found in proof.verifications:
        table.add_row(*_cells(found))
    heading = f"Two planned steps beside two plain ones, batch size {proof.batch_size:,}"
    parts: list[RenderableType] = [Text(heading, style="bold"), Padding(table, INDENT)]
    notes = [*proof.notes, *_notes(proof)]
    if notes:
        parts += ["", *(Padding(Text(f"- {note}"), INDENT) for note in notes)]
    parts += ["", Text(_LEGEND, style="dim")]
    return at_page_width(*parts)


_LEGEND = (
    "error = |planned - plain| / |plain|, the largest over loss, gradients, updated parameters "
    "and buffers; * with random draws made deterministic"
)


def _cells(found: Verification) -> tuple[RenderableType, ...]:
    style = "green" if found.is_proof else "bold yellow"
    earned = Text(found.earned, style=style if found.keeps_promise else "bold red")
    mark = "" if found.deterministic_error is None else "*"
    plan = Text(plan_name(found.strategies, width=PLAN_WIDTH))
    if found.deciding_error:
        plan.append(f"\nmost in {found.worst}", style="dim")
    return (
        plan,
        Text(found.numerics),
        earned,
        Text(found.dtype.replace("float", "fp")),
        Text(f"{found.deciding_error:.1e}{mark}"),
    )


def _notes(proof: Verifications) -> list[str]:
    """Gather what plans have to say, once each, and what could not be tried."""
    own = [note for found in proof.verifications for note in (*found.effects, *found.notes)]
    tried = [f"not tried: {name}: {reason}" for name, reason in proof.failed]
    return [*dict.fromkeys(own), *tried]
