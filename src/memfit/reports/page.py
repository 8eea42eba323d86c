"""What all pages share: single files that ask nothing of the network.

A page gets plain rows and formatted text; its template decides only how they look.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.errors import MissingExtraError
from memfit.units import format_bytes, format_seconds

from .charts.embedding import visible
from .plots import CATEGORY_COLOURS, OTHER_COLOUR
from .rollup import rolled_up, unfolded
from .wording import brief_plan, change_words, largest_first, module_name, percent, plan_name

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

INLINE_POINTS = 1600
"""An inline picture needs no more points than a wide screen has columns for a panel."""
TOP_MODULES = 12
TONES = {True: "good", False: "bad", None: ""}
"""The class of what fits, of what does not, and where there is no budget."""
_QUOTED = re.compile(r"`([^`\n]+)`")
_JOINT = re.compile(r"([/\\.:_])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One headline number with the lines below it."""

    label: str
    value: str
    notes: tuple[str, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPart:
    """One category or module at the peak of one step, or of the plain and the planned one."""

    name: str
    colour: str
    cells: tuple[str, ...]
    widths: Mapping[str, float]
    """The bars: which step, and percent of the widest bar in the table."""


def page_environment() -> Environment:
    """Make the template environment.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("The HTML report", "jinja2", "html") from error
    environment = Environment(
        loader=PackageLoader("memfit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=format_bytes,
        seconds=format_seconds,
        plan=plan_name,
        brief=brief_plan,
        module=module_name,
        prose=_prose,
        breakable=_breakable,
    )
    return environment


def _shown(value: object) -> object:
    """Let no plain text into a page that cannot be seen; what is marked up already is ours."""
    return visible(value) if type(value) is str else value


def _prose(text: str) -> Markup:
    """Set what a sentence quotes in backticks as code."""
    from markupsafe import Markup, escape

    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(visible(text)))))


def _breakable(text: str) -> Markup:
    """Let a line end behind the signs that join the parts of a name, and not within a part."""
    from markupsafe import Markup, escape

    return Markup(_JOINT.sub(r"\1<wbr>", str(escape(visible(text)))))


def peak_parts(
    planned: Mapping[str, int],
    whole_bytes: int,
    *,
    plain: Mapping[str, int] | None = None,
    limit: int | None = None,
) -> list[PeakPart]:
    """List the parts of a peak, largest first, beside those of the plain step where given.

    Args:
        planned: bytes by category or module.
        whole_bytes: the peak that they are parts of.
        plain: the same of the step without any strategy.
        limit: past so many, the rest is added up in one part.
    """
    before = plain or {}
    highest = {name: max(planned.get(name, 0), before.get(name, 0)) for name in (*before, *planned)}
    names = [name for name, _ in largest_first(highest)]
    if limit is not None and len(names) > limit:
        rest = f"({len(names) - limit} others)"
        planned, before = (
            {**side, rest: sum(side.get(name, 0) for name in names[limit:])}
            for side in (planned, before)
        )
        names = [*names[:limit], rest]
    widest = max([1, *(side.get(name, 0) for side in (planned, before) for name in names)])
    parts = []
    for name in names:
        now, then = planned.get(name, 0), before.get(name, 0)
        cells: tuple[str, ...] = (format_bytes(now), percent(now, whole_bytes))
        bars = {"planned": now}
        if plain is not None:
            cells = (format_bytes(then), cells[0], change_words(then, now), cells[1])
            bars = {"plain": then, **bars}
        parts.append(
            PeakPart(
                name=module_name(name),
                colour=CATEGORY_COLOURS.get(name, OTHER_COLOUR),
                cells=cells,
                widths={step: round(100 * found / widest, 2) for step, found in bars.items()},
            )
        )
    return parts


def module_parts(by_module: Mapping[str, int], whole_bytes: int) -> list[PeakPart]:
    """List the modules of one peak, alike ones in one row, the largest unfolded."""
    groups = unfolded(rolled_up(by_module), TOP_MODULES)
    rows = {
        f"{module_name(group.name)} ({group.each})" if group.each else module_name(group.name): (
            group.total_bytes
        )
        for group in groups
    }
    return peak_parts(rows, whole_bytes)
