"""Puts charts into a page: their data as JSON, the library and memfit's own scripts, by their hash.

The page's policy names the hash of each script, so that nothing else runs in it, whatever a name
from outside may hold. Names are data: they are escaped here, and scripts show them as text only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from memfit.journal.printable import printable

if TYPE_CHECKING:
    from markupsafe import Markup

_SCRIPTS = ("page.js", "step.js", "holders.js", "lines.js", "bars.js", "frontier.js", "errors.js")
"""In the order in which they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What a page needs to draw its charts."""

    data: Markup
    """By the name of each chart, as JSON that is safe inside an element of a page."""
    scripts: tuple[Markup, ...]
    policy: str
    """What a content security policy allows of scripts."""


def charts_of(contents: Mapping[str, Mapping[str, Any] | None]) -> Charts | None:
    """Make the charts of a page; None where there is nothing to draw.

    Args:
        contents: the data of each chart by its name; None leaves a chart out.

    Raises:
        ValueError: if a number is not finite.
    """
    from markupsafe import Markup

    drawn = {name: content for name, content in contents.items() if content is not None}
    if not drawn:
        return None
    scripts = _scripts()
    text = json.dumps(drawn, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Charts(
        data=Markup(text),  # every sign that means something is escaped
        scripts=tuple(Markup(script) for script in scripts),  # files of this package
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )


def visible(text: str) -> str:
    """Spell out characters that cannot be seen, or that turn what follows around."""
    return printable(text)


@cache
def _scripts() -> tuple[str, str]:
    folder = files(__package__)
    own = (folder.joinpath("scripts", name).read_text("utf-8") for name in _SCRIPTS)
    library = folder.joinpath("echarts", "echarts.min.js").read_text("utf-8")
    return library, "\n".join(own)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
