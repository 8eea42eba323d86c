"""The words of a comparison, which the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.peak_changes.comparison import Comparison, LineChange, Verdict
from memfit.peak_changes.moments import Moment
from memfit.peak_changes.parts import PartChange
from memfit.peak_changes.saved import STEADY_STEP
from memfit.peak_changes.sides import Kind, Side
from memfit.units import format_bytes, format_seconds

from .wording import FIGURE_NAMES, change_words, module_name, plan_name

FIGURES = {
    "peak_reserved_bytes": "peak reserved",
    "process_bytes": "process",
    "predicted_peak_bytes": "predicted peak",
    "host_peak_bytes": "host peak",
}
_MOST_MODULES = 3


def signed_bytes(num_bytes: int) -> str:
    """Write a change in bytes with its sign: ``+12.0 MiB``."""
    return f"{'+' if num_bytes > 0 else ''}{format_bytes(num_bytes)}"


def exact_bytes(num_bytes: int) -> str:
    """Write a change to the byte: ``+12,582,912 bytes``."""
    return f"{num_bytes:+,} bytes" if num_bytes else "0 bytes"


def verdict_sentence(found: Comparison) -> str:
    """Say what became of the peak, and whether that is allowed."""
    before, after = (format_bytes(side.peak_bytes) for side in (found.before, found.after))
    whose = _whose_peak(found)
    if found.verdict is Verdict.SAME:
        return f"{whose} stays as it was: {after}."
    before_bytes, after_bytes = found.before.peak_bytes, found.after.peak_bytes
    share = f", {change_words(before_bytes, after_bytes)}" if before_bytes else ""
    way = "falls" if found.verdict is Verdict.LOWER else "rises"
    changed = (
        f"{whose} {way} by {format_bytes(abs(found.change_bytes))}, from {before} to {after} "
        f"({exact_bytes(found.change_bytes)}{share})"
    )
    if found.verdict is Verdict.LOWER:
        return f"{changed}."
    if found.verdict is Verdict.WITHIN_TOLERANCE:
        return f"{changed}, within the tolerance of {format_bytes(found.tolerance_bytes)}."
    return f"{changed}; the tolerance is {format_bytes(found.tolerance_bytes)}."


def _whose_peak(found: Comparison) -> str:
    kinds = {found.before.kind, found.after.kind}
    memory = " host" if found.after.peak_of == "host" else ""
    if len(kinds) > 1:
        return f"The{memory} peak"
    return f"The {kinds.pop().value}{memory} peak"


def budget_sentence(found: Comparison) -> str:
    """Say whether the second fits its budget, and whether the first did; empty without one."""
    fits, fitted = found.fits(found.after), found.fits(found.before)
    side = found.after
    budget_bytes = found.budget_bytes if found.budget_bytes is not None else side.budget_bytes
    if fits is None or budget_bytes is None:
        return ""
    figure = f"{FIGURE_NAMES[found.bounded]} {format_bytes(side.bounded_bytes(found.bounded))}"
    before = ""
    if fitted is not None and fitted is not fits:
        before = "; before, it did" if fitted else "; before, it did not"
    verb = "fits" if fits else "does not fit"
    return f"It {verb} the budget of {format_bytes(budget_bytes)}: {figure}{before}."


def tone(found: Comparison) -> str:
    """Return how the verdict is to be taken: ``good``, ``bad`` or neither."""
    if found.is_regression:
        return "bad"
    return "" if found.verdict is Verdict.WITHIN_TOLERANCE else "good"


def side_words(side: Side) -> str:
    """Name what stands on a side: the job, where, with which batch and plan."""
    ranks = f" ({side.ranks} ranks)" if side.ranks > 1 else ""
    where = f" on {side.device}{ranks}" if side.device else ""
    batch = "" if side.batch_size is None else f", batch {side.batch_size:,}"
    plan = f", {plan_name(side.strategies)}" if side.strategies else ""
    kind = "measured" if side.kind is Kind.MEASURED else ""
    title = side.title if side.title != side.source else ""
    words = f"{title}{where}{batch}{plan}".strip()
    return f"{kind}: {words}" if kind else words


def notes(found: Comparison) -> list[str]:
    """Say what else differs, and what is not known, a sentence each."""
    return [*_different_settings(found), *_different_peaks(found)]


def _different_settings(found: Comparison) -> Iterator[str]:
    before, after = found.before, found.after
    if before.device != after.device:
        yield (
            f"Other devices: {before.device or 'unknown'} before and {after.device or 'unknown'} "
            "after. Blocks are rounded and kernels chosen otherwise there, so what the code "
            "changes cannot be told from that."
        )
    rows = [
        ("batch size", before.batch_size, after.batch_size),
        ("number of ranks", before.ranks, after.ranks),
        ("plan", plan_name(before.strategies), plan_name(after.strategies)),
        ("torch", before.torch_version, after.torch_version),
    ]
    for name, one, other in rows:
        if one != other and one not in (None, "") and other not in (None, ""):
            yield f"Another {name}: {one} before, {other} after."
    if before.kind is not after.kind:
        yield (
            f"One is {before.kind.value} and the other {after.kind.value}; where a prediction is "
            "not exact, they differ without any change of the code."
        )


def _different_peaks(found: Comparison) -> Iterator[str]:
    if found.moments is None:
        yield (
            "Runs do not note the lines of their memory. Compare predictions for them: "
            "`memfit predict FILE.py:NAME --save FILE`."
        )
        return
    phases = {found.before.peak_phase, found.after.peak_phase}
    if phases != {STEADY_STEP}:
        yield (
            f"The highest peak is that of the {found.before.peak_phase} before and of the "
            f"{found.after.peak_phase} after. Lines, modules and categories are those of the "
            "steady step."
        )
    yield from _moved_moments(found)
    before, after = found.moments
    asked_bytes = after.num_bytes - before.num_bytes
    if phases == {STEADY_STEP} and not _has_moved(found) and asked_bytes != found.change_bytes:
        yield (
            f"What lines ask for changes by {exact_bytes(asked_bytes)}; the rest is what the "
            "allocator adds, which gives out some blocks larger than asked for."
        )


def _has_moved(found: Comparison) -> bool:
    """Return whether the step's peak lies in another phase than before."""
    before, after = found.before.moments, found.after.moments
    return bool(before and after and before.highest.phase != after.highest.phase)


def _moved_moments(found: Comparison) -> Iterator[str]:
    """Say that the peak of the step lies elsewhere, where it does."""
    known = found.before.moments, found.after.moments
    if found.moments is None or known[0] is None or known[1] is None:
        return
    before, after = found.moments
    highest = known[0].highest
    if _has_moved(found):
        asked = [format_bytes(moment.num_bytes) for moment in found.moments]
        yield (
            f"The peak of the step has moved, from {_place(highest)} to {_place(after)}. Lines, "
            f"modules and categories are those of the {after.phase}'s highest moment, which asks "
            f"for {asked[0]} before and {asked[1]} after."
        )
    elif known[0].reading(before) != known[1].reading(after):
        yield (
            f"The peak of the step has moved within {after.phase}, from {before.source_line} to "
            f"{after.source_line}: lines also differ by what lives there briefly."
        )


def _place(moment: Moment) -> str:
    return f"{moment.phase} ({moment.source_line})" if moment.source_line else moment.phase


def where_words(line: LineChange) -> str:
    """Name a line and its function, or the modules of what no line stands behind."""
    if not line.source_line:
        return modules_words(line.modules)
    function = f" in {line.function}" if line.function not in ("", "<module>") else ""
    return f"{line.source_line}{function}{_newness(line)}"


def _newness(line: LineChange) -> str:
    if line.is_new:
        return " (new)"
    return " (gone)" if line.is_gone else ""


def what_words(line: LineChange) -> str:
    """Say what came or went, to the byte: categories, and modules where there is a line."""
    categories = list(line.by_category.items())
    what = f"{exact_bytes(line.change_bytes)}: "
    if len(categories) == 1:
        what += categories[0][0]
    else:
        what += ", ".join(f"{name} {num_bytes:+,}" for name, num_bytes in categories)
    named = line.source_line and any(module.name for module in line.modules)
    return f"{what}, in {modules_words(line.modules)}" if named else what


def modules_words(modules: Sequence[PartChange]) -> str:
    """Name modules, those of one kind together."""
    named = [
        module_name(module.name)
        + (f" ({module.num_members} modules)" if module.num_members > 1 else "")
        for module in modules[:_MOST_MODULES]
    ]
    more = len(modules) - _MOST_MODULES
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def figure_rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    """List what is known of both besides the peak: a name, before, after and the change."""
    rows = [
        (f"peak, {row.name}", row.before_bytes, row.after_bytes)
        for row in found.phases
        if len(found.phases) > 1
    ]
    for name, words in FIGURES.items():
        before, after = found.before.figures.get(name), found.after.figures.get(name)
        if before is not None and after is not None:
            rows.append((words, before, after))
    written = [
        (name, format_bytes(before), format_bytes(after), change_words(before, after))
        for name, before, after in rows
    ]
    before_seconds, after_seconds = found.before.step_seconds, found.after.step_seconds
    if before_seconds and after_seconds:
        change = change_words(before_seconds, after_seconds)
        written.append(
            ("step time", format_seconds(before_seconds), format_seconds(after_seconds), change)
        )
    return written
