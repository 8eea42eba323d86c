"""A replayed snapshot, or a run's end, for a terminal: the moment, who held it, what would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.snapshots.result import HeldMemory, Outcome, SnapshotReplay
from memfit.snapshots.run_folder import RunReplay
from memfit.units import format_bytes

from .terminal import INDENT, Bar, amount, at_page_width, dashed, folded, grid, section, word
from .wording import percent

_MOST_LINES = 12
_DEFAULTS = "the defaults"
_VERDICTS = {
    True: ("yes", "green"),
    False: ("no", "bold red"),
    None: ("not known", "yellow"),
}


def replay_report(replay: SnapshotReplay) -> RenderableType:
    """Show the moment, what held the memory, what was free, and other settings."""
    parts: list[RenderableType] = [
        Text(_heading(replay), style="bold"),
        Text(_conclusion(replay)),
        "",
        Padding(_figures(replay), INDENT),
    ]
    if replay.by_line:
        title = "In use, by the line that asked for it"
        parts.append(section(title, _held(replay.by_line, replay.allocated_bytes)))
    if len(replay.by_doing) > 1 or replay.by_category:
        doing = replay.by_category or replay.by_doing
        title = "In use, by category" if replay.by_category else "In use, by what was done (guess)"
        parts.append(section(title, _shares(doing, replay.allocated_bytes)))
    if replay.free is not None and replay.free.total_bytes:
        parts.append(section("Held by the allocator and free", _free(replay)))
    if replay.outcomes:
        parts.append(section("The same allocations under other settings", _outcomes(replay)))
    sentences = [_agreement(replay), *_reasons(replay.outcomes), *replay.notes]
    parts.append(section("To know", dashed(Text(each) for each in sentences if each)))
    return at_page_width(*parts)


def _heading(replay: SnapshotReplay) -> str:
    where = f"on device {replay.device}"
    if replay.kind == "failure":
        return f"Out of memory {where}, entry {replay.entry:,} of {replay.num_entries:,}"
    if replay.kind == "peak":
        return f"Peak of allocated memory {where}, entry {replay.entry:,} of {replay.num_entries:,}"
    return f"What was held {where} when the snapshot was taken"


def _conclusion(replay: SnapshotReplay) -> str:
    """Say in a sentence or two what would have helped."""
    if replay.request is None:
        return "Nothing failed in this history."
    surviving = [each for each in replay.outcomes if each.survives]
    recorded = next((each for each in replay.outcomes if each.is_recorded), None)
    sentences = []
    if surviving:
        # The first one is that of PyTorch's own advice; the table has the others.
        name = surviving[0].settings or "(empty)"
        how = "would probably" if surviving[0].is_guess else "would"
        sentences.append(f"PYTORCH_ALLOC_CONF={name} {how} have served this request.")
    elif replay.outcomes and all(each.survives is False for each in replay.outcomes):
        sentences.append("None of the settings tried would have served this request.")
    if recorded is not None and recorded.least_reduction_bytes:
        sentences.append(
            f"Under the recorded settings, {format_bytes(recorded.least_reduction_bytes)} less in "
            "this one request would have."
        )
    return " ".join(sentences) or "Whether other settings would have helped is not known."


def _figures(replay: SnapshotReplay) -> Table:
    table = grid(Column(style="dim", no_wrap=True), amount(), Column(style="dim"))
    request = replay.request
    if request is not None:
        asked = request.line or "no stack recorded"
        asked += f", from {request.called_from}" if request.called_from else ""
        table.add_row(
            "request", format_bytes(request.num_bytes), Text(f"{asked} ({request.doing})")
        )
    held = percent(replay.allocated_bytes, replay.reserved_bytes) if replay.reserved_bytes else "-"
    table.add_row("in use", format_bytes(replay.allocated_bytes), Text(f"{held} of reserved"))
    table.add_row("reserved", format_bytes(replay.reserved_bytes), "")
    if replay.limit_bytes is not None:
        table.add_row("limit", format_bytes(replay.limit_bytes), Text(replay.limit_source))
    if request is not None:
        missing = request.missing_bytes
        note = "" if missing is None else f"{format_bytes(missing)} short of the segment needed"
        table.add_row("device had", format_bytes(request.device_free_bytes), Text(note))
    table.add_row("settings", "", Text(replay.settings or _DEFAULTS))
    return table


def _held(held: Sequence[HeldMemory], total_bytes: int) -> Table:
    table = grid(amount(), amount(), amount("blocks"), folded("line"))
    for each in held[:_MOST_LINES]:
        place = Text(each.name)
        if each.called_from:
            place.append(f"\n  from {each.called_from}", style="dim")
        share = percent(each.num_bytes, total_bytes)
        table.add_row(format_bytes(each.num_bytes), share, f"{each.num_blocks:,}", place)
    rest = held[_MOST_LINES:]
    if rest:
        rest_bytes = sum(each.num_bytes for each in rest)
        num_blocks = sum(each.num_blocks for each in rest)
        words = Text(f"{len(rest):,} more lines", style="dim")
        share = percent(rest_bytes, total_bytes)
        table.add_row(format_bytes(rest_bytes), share, f"{num_blocks:,}", words)
    return table


def _shares(parts: Mapping[str, int], total_bytes: int) -> Table:
    table = grid(word(), amount(), Column())
    for name, num_bytes in parts.items():
        fraction = num_bytes / total_bytes if total_bytes else 0.0
        table.add_row(Text(name), format_bytes(num_bytes), Bar(fraction))
    return table


def _free(replay: SnapshotReplay) -> Table:
    free = replay.free
    assert free is not None, "asked for only where it is known"
    table = grid(amount(), Column())
    table.add_row(format_bytes(free.total_bytes), f"in {free.num_blocks:,} blocks")
    largest_bytes = free.largest_usable_block_bytes
    if replay.request is not None and largest_bytes is not None:
        words = (
            f"the largest that the request of {format_bytes(replay.request.num_bytes)} could use"
        )
        table.add_row(format_bytes(largest_bytes), words)
        words = "in blocks of its own pool that are too small, between blocks in use"
        table.add_row(format_bytes(free.too_small_bytes), words)
    else:
        table.add_row(format_bytes(free.largest_block_bytes), "the largest block")
    if free.other_pools_bytes:
        table.add_row(format_bytes(free.other_pools_bytes), "in pools that it could not use")
    if free.returnable_bytes:
        table.add_row(
            format_bytes(free.returnable_bytes), "in whole segments, given back on demand"
        )
    return table


def _outcomes(replay: SnapshotReplay) -> Table:
    names = ("would serve", "less would", "peak reserved")
    table = grid(folded("PYTORCH_ALLOC_CONF"), *map(amount, names))
    for outcome in replay.outcomes:
        words, style = _VERDICTS[outcome.survives]
        if replay.limit_bytes is None:
            words, style = "-", "dim"
        elif outcome.is_guess and outcome.survives is not None:
            words, style = f"{words} (guess)", "yellow"
        reduction_bytes = outcome.least_reduction_bytes
        less = "-" if not reduction_bytes else format_bytes(reduction_bytes)
        name = outcome.settings or _DEFAULTS
        table.add_row(
            Text(f"{name} (as recorded)" if outcome.is_recorded else name),
            Text(words, style=style),
            less,
            format_bytes(outcome.peak_reserved_bytes),
        )
    return table


def _reasons(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say once what is to be said of several settings."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        for reason in (outcome.reason, outcome.needs):
            by_reason.setdefault(reason, []).append(outcome.settings or _DEFAULTS)
    by_reason.pop("", None)
    for reason, names in by_reason.items():
        yield reason if len(names) == len(outcomes) else f"{'; '.join(names)}: {reason}"


def _agreement(replay: SnapshotReplay) -> str:
    """Say how far the replay can be trusted, by the one that is known to be true."""
    agreement = replay.agreement
    if agreement is None:
        return ""
    recorded = format_bytes(agreement.recorded_peak_reserved_bytes)
    simulated = format_bytes(agreement.simulated_peak_reserved_bytes)
    segments = (
        f"{agreement.num_equal_segments:,} of {agreement.num_recorded_segments:,} recorded calls "
        f"to the device are met in order, peak reserved {simulated} instead of {recorded}"
    )
    if agreement.is_reproduced:
        return f"Under the recorded settings the replay ends as the record does: {segments}."
    return (
        f"Under the recorded settings the replay does NOT end as the record does: {segments}. What "
        "it says of other settings is held back where that matters."
    )


def run_replay_report(replay: RunReplay) -> RenderableType:
    """Show what a journal says of running out of memory."""
    heading = f"{replay.source}: {replay.reason or 'no ending written'}"
    parts: list[RenderableType] = [Text(heading, style="bold")]
    parts += [Text(each) for each in (replay.sentence, replay.remedy) if each]
    parts += ["", Padding(_run_figures(replay), INDENT)]
    if replay.by_category:
        total_bytes = sum(replay.by_category.values())
        title = f"In use at the highest point of step {replay.category_step:,}, by category"
        parts.append(section(title, _shares(replay.by_category, total_bytes)))
    if replay.leaks:
        lines = [f"{leak.holder}: {leak.sentence}" for leak in replay.leaks]
        parts.append(section("What kept growing", dashed(map(Text, lines))))
    if replay.events:
        parts.append(section("Out of memory before", dashed(map(Text, replay.events))))
    if replay.snapshots:
        lines = [f"memfit replay {path}" for path in replay.snapshots]
        parts.append(section("Snapshots in the folder", dashed(map(Text, lines))))
    parts.append(section("To know", dashed(map(Text, replay.notes))))
    return at_page_width(*parts)


def _run_figures(replay: RunReplay) -> Table:
    table = grid(Column(style="dim", no_wrap=True), word(), Column(style="dim"))
    sizes = {
        "peak allocated": (replay.peak_allocated_bytes, _step_words(replay.peak_step)),
        "peak reserved": (replay.peak_reserved_bytes, ""),
        "predicted": (replay.predicted_peak_bytes, ""),
        "budget": (replay.budget_bytes, ""),
    }
    if replay.failed_step is not None:
        table.add_row("failed step", f"{replay.failed_step:,}", replay.phase)
    for name, (num_bytes, words) in sizes.items():
        if num_bytes is not None:
            table.add_row(name, format_bytes(num_bytes), words)
    if replay.allocator_retries:
        table.add_row("retries", f"{replay.allocator_retries:,}", "caches emptied to go on")
    return table


def _step_words(step: int | None) -> str:
    return "" if step is None else f"in step {step:,}"
