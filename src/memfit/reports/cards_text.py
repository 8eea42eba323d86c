"""One step on several devices for a terminal: a row each, those first that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.figures import Certainty
from memfit.prediction.compared_cards import ComparedCard
from memfit.units import format_bytes, format_seconds

from .terminal import INDENT, amount, at_page_width, dashed, folded, grid
from .wording import FIGURE_NAMES, bounded_certainty, interval_words, plan_name, verdict

_MOST_ROWS = 30
_MOST_NAMED = 6
_STYLES = {"yes": "green", "no": "bold red", "uncertain": "bold yellow", "-": "dim"}


def cards_table(
    cards: Sequence[ComparedCard],
    *,
    job: str,
    failures: Mapping[str, str] | None = None,
    num_left_out: int = 0,
    in_full: bool = False,
) -> RenderableType:
    """Show what a step takes on several devices.

    Args:
        cards: the devices, in the order in which they are shown.
        job: how the step was named.
        failures: why there is no answer for a device, by its name.
        num_left_out: devices that were not looked at, since the user has ended it.
        in_full: show every row, however many there are.
    """
    shown = cards if in_full else cards[:_MOST_ROWS]
    first = cards[0].prediction
    heading = f"Predicted step of {job}"
    budgets = {each.prediction.budget_bytes for each in cards}
    if len(cards) > 1 and len(budgets) == 1 and first.budget_bytes:
        heading += f" in {format_bytes(first.budget_bytes)}"
    if first.batch_size is not None:
        heading += f", batch size {first.batch_size:,}, {plan_name(first.strategies)}"
    parts: list[RenderableType] = [
        Text(fits_words(cards), style="bold"),
        Text(heading, style="dim"),
        Padding(_table(shown), INDENT),
    ]
    if len(shown) < len(cards):
        more = f"and {len(cards) - len(shown)} more; --verbose shows all, --html a page."
        parts.append(Padding(Text(more, style="dim"), INDENT))
    parts.append(Text("\n".join(card_notes(cards)), style="dim"))
    if failures:
        told = [Text(f"{name}: {reason}") for name, reason in failures.items()]
        parts += ["", Text("No answer", style="bold"), Padding(dashed(told), INDENT)]
    if num_left_out:
        left = f"Ended before the last {num_left_out} were looked at."
        parts.append(Text(left, style="bold yellow"))
    return at_page_width(*parts)


def fits_words(cards: Sequence[ComparedCard]) -> str:
    """Say on which devices a step fits: by name where they are few, else how many and the best."""
    names = {
        word: [each.prediction.device for each in cards if verdict(each.prediction) == word]
        for word in ("yes", "uncertain", "no")
    }
    if not any(names.values()):
        return "No budget was given."
    if len(cards) <= _MOST_NAMED:
        ways = (("yes", "Fits {}."), ("uncertain", "Uncertain on {}."), ("no", "Does not fit {}."))
        return " ".join(form.format(", ".join(names[word])) for word, form in ways if names[word])
    sentence = f"Fits {len(names['yes'])} of {len(cards)} devices"
    sentence += f", uncertain on {len(names['uncertain'])}." if names["uncertain"] else "."
    fitting = [each for each in cards if verdict(each.prediction) == "yes"]
    if fitting:
        fastest, least = (
            fitting[0],
            min(fitting, key=lambda each: each.memory_bytes),
        )
        sentence += f" Fastest: {fastest.prediction.device}. Least memory: "
        sentence += f"{least.prediction.device}."
    return sentence


def card_notes(cards: Sequence[ComparedCard]) -> list[str]:
    """Explain the columns, and say what some devices have in common."""
    notes = []
    predictions = [each.prediction for each in cards]
    if any(map(_is_guess, cards)) or any(
        each.seconds_certainty is Certainty.GUESS for each in cards
    ):
        notes.append("~ rests on a guess. Step times are estimates from the speeds of the device.")
    if any(each.largest_batch for each in cards):
        notes.append(
            "batch: the most samples at a time that fit, by doubling the batch or cutting it into "
            "micro-batches; + where more may."
        )
    elif predictions[0].batch_size is not None:
        notes.append("The largest batch that fits is looked for where there are eight or fewer.")
    said: list[tuple[str, str]] = []
    for each in cards:
        device = each.prediction.device
        found = each.largest_batch
        if found is not None and found.reason:
            said.append((found.reason.rstrip("."), device))
        # What is said of a device by its name may hold for others as well.
        said += [(note.removeprefix(f"{device} "), device) for note in each.prediction.notes]
    for note in dict.fromkeys(note for note, _ in said):
        devices = [device for other, device in said if other == note]
        notes.append(f"{note}." if len(devices) == len(cards) else f"{_named(devices)}: {note}.")
    return notes


def needed_words(card: ComparedCard) -> str:
    """Write what a step needs on a device; a guess is marked."""
    return f"{'~' if _is_guess(card) else ''}{format_bytes(card.needed_bytes)}"


def seconds_words(card: ComparedCard) -> str:
    """Write the seconds of a step; a guess is marked."""
    mark = "~" if card.seconds_certainty is Certainty.GUESS else ""
    return f"{mark}{format_seconds(card.prediction.step_seconds)}"


def fits_cell(card: ComparedCard) -> str:
    """Write whether a step fits, or by how much it is over."""
    word = verdict(card.prediction)
    return f"{format_bytes(card.over_bytes)} over" if word == "no" and card.over_bytes > 0 else word


def batch_words(card: ComparedCard) -> str:
    """Write the most samples at a time that fit."""
    found = card.largest_batch
    if found is None or found.batch_size is None:
        return "-"
    return f"{found.batch_size:,}{'' if found.is_most else '+'}"


def figure_names(cards: Sequence[ComparedCard]) -> str:
    """Name the figures that the budgets bound."""
    return " or ".join(dict.fromkeys(FIGURE_NAMES[each.prediction.budget_of] for each in cards))


def interval_of(card: ComparedCard) -> str:
    """Write the interval of what is needed."""
    prediction = card.prediction
    if card.needed_bytes != prediction.bounded_bytes():
        return ""  # it is of the steady step, and another phase needs more
    return interval_words(prediction.intervals.get(prediction.budget_of))


def _table(cards: Sequence[ComparedCard]) -> Table:
    has_batch = any(each.largest_batch for each in cards)
    table = grid(
        folded("device"),
        *map(amount, ("memory", figure_names(cards))),
        Column("fits", no_wrap=True),
        *map(amount, ("step", "batch") if has_batch else ("step",)),
    )
    for each in cards:
        table.add_row(
            Text(each.prediction.device),
            format_bytes(each.memory_bytes),
            needed_words(each),
            Text(fits_cell(each), style=_STYLES[verdict(each.prediction)]),
            seconds_words(each),
            *([batch_words(each)] if has_batch else []),
        )
    return table


def _is_guess(card: ComparedCard) -> bool:
    return bounded_certainty(card.prediction) is Certainty.GUESS


def _named(devices: Sequence[str]) -> str:
    """Name devices, of many the first."""
    if len(devices) <= _MOST_NAMED:
        return ", ".join(devices)
    return f"{', '.join(devices[:_MOST_NAMED])} and {len(devices) - _MOST_NAMED} more"
