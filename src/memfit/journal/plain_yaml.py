"""Reads a user's YAML within bounds: neither aliases that multiply nor endless nesting."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from .plain_text import TOO_DEEP, check_extent

_MOST_LEVELS = 64
_MOST_CHARACTERS, _MOST_ENTRIES = 2**19, 8000
"""Either takes most of a second. A plan for a model of a thousand modules has 5,000 entries."""


def parsed_yaml(text: str) -> Any:
    """Parse YAML of plain values; an alias, which stands for another part of the file, is refused.

    Raises:
        ValueError: if it is none, or goes beyond the bounds.
    """
    check_yaml_extent(text)
    try:
        return bounded_yaml(refuses_aliases=True).load(text)
    except YAMLError as error:
        raise ValueError(yaml_fault(error)) from None
    except (RecursionError, OverflowError):
        raise ValueError(TOO_DEEP) from None
    except TypeError as error:  # keys of lists of mappings
        msg = f"it has a key that is no plain value ({error})"
        raise ValueError(msg) from None


def check_yaml_extent(text: str) -> None:
    """Refuse a text that YAML would take more than a second to read.

    Raises:
        ValueError: with how much is read.
    """
    check_extent(text, most_characters=_MOST_CHARACTERS, most_entries=_MOST_ENTRIES)


def yaml_fault(error: Exception) -> str:
    """Say in a line what is wrong with a text that was to be YAML."""
    problem = getattr(error, "problem", None)
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f", line {mark.line + 1}"
    lines = str(problem or error).strip().splitlines()
    return f"{lines[0][:200] if lines else type(error).__name__}{where}"


def bounded_yaml(*, refuses_aliases: bool) -> Any:
    """Return a reader of YAML that gives up on what is nested too deeply."""

    class PlainComposer(Composer):
        """Compose nodes down to a depth."""

        level = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Compose a node, or say why not."""
            begin = self.parser.peek_event().start_mark
            if refuses_aliases and self.parser.check_event(AliasEvent):
                raise ComposerError(None, None, "it has an alias (*name): write out", begin)
            if self.level >= _MOST_LEVELS:
                raise ComposerError(None, None, TOO_DEEP, begin)
            self.level += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.level -= 1

    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = PlainComposer
    return yaml
