"""The report of a proof for a terminal: what plans claim, what they earned, where they are off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from .terminal import INDENT, PLAN_WIDTH, Name, amount, at_page_width, folded, grid, shorten, word
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


def brief_proof(proof: Verifications) -> RenderableType:
    """Say whether every plan keeps what it claims, and show a line for each."""
    table = grid(Column(), *map(word, ("claims", "earned", "in")), amount("error"))
    for found in proof.verifications:
        _, *cells = _cells(found)
        table.add_row(Name(plan_name(found.strategies), _NAME_WIDTH), *cells)
    parts: list[RenderableType] = [_verdict(proof)]
    heading = f"Two planned steps beside two plain ones, batch size {proof.batch_size:,}"
    parts += [Text(heading, style="dim"), Padding(table, INDENT)]
    num_notes = len([*proof.notes, *_notes(proof)])
    notes = f"{num_notes} {'note' if num_notes == 1 else 'notes'}"
    more = f"--verbose shows {notes} and where plans differ most." if num_notes else ""
    parts += ["", Text(more or "--verbose shows where plans differ most.", style="dim")]
    return at_page_width(*parts)


def _verdict(proof: Verifications) -> Text:
    """Say in a sentence how many plans keep what they claim."""
    found = proof.verifications
    broken = [each for each in found if not each.keeps_promise]
    if not found:
        return Text("No plan could be tried.", style="bold yellow")
    if broken:
        names = ", ".join(shorten(plan_name(each.strategies), _NAME_WIDTH) for each in broken[:2])
        many = f"{len(broken)} of {len(found)} plans do" if len(found) > 1 else "The plan does"
        return Text(f"{many} not keep what is claimed: {names}.", style="bold red")
    who = "The plan keeps" if len(found) == 1 else f"All {len(found)} plans keep"
    sentence = f"{who} what is claimed"
    if exact := [each.deciding_error for each in found if each.earned == "exact"]:
        sentence += f"; where that is exact, the largest error is {max(exact):.1e}"
    num_unproved = sum(not each.is_proof for each in found)
    if num_unproved:
        sentence += f"; {num_unproved} as far as could be seen"
    return Text(f"{sentence}.", style="bold yellow" if num_unproved else "bold green")


_NAME_WIDTH = 40
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
