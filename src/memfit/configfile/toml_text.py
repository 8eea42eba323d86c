"""TOML, through tomlkit, which keeps comments and layout; ``tomllib`` reads what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.errors import ConfigFileError, MissingExtraError
from memfit.journal.plain_text import parsed_toml

from .tree import Entry, Insertion, Key, Tree, Value, line_break_of


def read_toml(text: str) -> Tree:
    """Read TOML.

    Raises:
        ConfigFileError: if it is none; a key that occurs twice is a fault of TOML itself.
    """
    # TOML's line breaks are LF and CRLF; tomllib takes a text as a file gives it.
    try:
        content = parsed_toml(text)
    except ValueError as error:
        raise ConfigFileError(f"it is no TOML: {error}") from None
    entries: dict[Key, Entry] = {}
    groups: set[Key] = set()
    _collect((), content, entries, groups)
    return Tree(entries=entries, groups=frozenset(groups))


def edit_toml(
    text: str, tree: Tree, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]
) -> str:
    """Replace and insert values.

    Raises:
        MissingExtraError: without tomlkit.
        ConfigFileError: if tomlkit would write the file otherwise than it is.
    """
    del tree  # tomlkit knows itself where values stand
    try:
        import tomlkit  # noqa: PLC0415 - an optional package, for TOML files alone
    except ImportError:
        raise MissingExtraError("Writing into TOML files", "tomlkit", "toml") from None
    document = tomlkit.parse(text)
    if tomlkit.dumps(document) != text:
        raise ConfigFileError("tomlkit cannot write it again as it is")
    for key, value in replaced.items():
        _group(document, key)[int(key[-1]) if key[-1].isdigit() else key[-1]] = value
    for each in inserted:
        item = tomlkit.item(each.value)
        item.trivia.trail = line_break_of(text)
        _group(document, each.key)[each.name] = item
    return str(tomlkit.dumps(document))


def _collect(key: Key, value: Any, entries: dict[Key, Entry], groups: set[Key]) -> None:
    if isinstance(value, (dict, list)):
        groups.add(key)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            _collect((*key, str(name)), part, entries, groups)
        return
    is_plain = isinstance(value, (str, int, float, bool))
    entries[key] = Entry(value=value if is_plain else str(value))


def _group(document: Any, key: Key) -> Any:
    for name in key[:-1]:
        document = document[int(name) if isinstance(document, list) else name]
    return document
