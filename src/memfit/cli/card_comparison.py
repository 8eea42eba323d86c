"""Shows what a step takes on several devices: as a table, as JSON, as a page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import NoPlanFitsError

from .command import write_json
from .device_by_device import FoundAnswers

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.figures import Prediction
    from memfit.prediction.compared_cards import ComparedCard

_INTERRUPTED = 130


def show_cards(
    args: argparse.Namespace,
    console: Console,
    found: FoundAnswers[Any],
    cards: Sequence[tuple[ComparedCard, Mapping[str, Any]]],
) -> int:
    """Show devices, those first that the step fits, and give the exit code.

    Args:
        args: of the command.
        console: where the table goes.
        found: which devices failed or were left out.
        cards: each with everything that is known of it as plain values.
    """
    from memfit.files import write_atomically
    from memfit.prediction.compared_cards import best_first
    from memfit.reports.cards_text import cards_table

    by_name = {card.prediction.device: content for card, content in cards}
    ordered = best_first(card for card, _ in cards)
    source = args.job or args.module
    if args.html:
        from memfit.reports.cards_html import cards_html

        page = cards_html(ordered, job=source, failures=found.failures)
        write_atomically(Path(args.html), page.encode())
    if args.json:
        values = [by_name[card.prediction.device] for card in ordered]
        write_json([*values, *found.failures_to_json()])
    else:
        console.print(
            cards_table(
                ordered,
                job=source,
                failures=found.failures,
                num_left_out=found.num_left_out,
                in_full=args.verbose,
            )
        )
        if args.html:
            console.print(f"Wrote {args.html}.", markup=False)
    if found.num_left_out:
        return _INTERRUPTED
    return exit_code_of([card.prediction for card in ordered])


def exit_code_of(predictions: Sequence[Prediction]) -> int:
    """Return 0 where a step fits a device or has no budget, 1 where that is not known, else 3."""
    fits = [each.budget_bytes is None or each.fits for each in predictions]
    return 0 if True in fits else 1 if None in fits else NoPlanFitsError.exit_code
