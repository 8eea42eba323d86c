"""JSON: values are replaced where they stand, so that tabs and line breaks stay as they are.

Python's own parser does not say where a value stands, so objects and arrays are walked here, and
each string, number and word is read by ``json`` itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from memfit.errors import ConfigFileError
from memfit.journal.plain_text import check_extent, parsed_json

from .tree import Entry, Insertion, Key, Splice, Tree, Value, dotted, line_of, spliced

_SPACE = re.compile(r"[ \t\n\r]*")


def read_json(text: str) -> Tree:
    """Read JSON.

    Raises:
        ConfigFileError: if it is none, or a key occurs twice.
    """
    try:
        check_extent(text)
        content = parsed_json(text)
    except ValueError as error:
        raise ConfigFileError(f"it is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigFileError("it is no JSON object with keys")
    walk = _Walk(text)
    walk.value((), _SPACE.match(text).end(), -1)  # type: ignore[union-attr]  # matches always
    inline = frozenset(walk.groups)
    return Tree(entries=walk.entries, groups=inline, inline=inline)


def edit_json(
    text: str, tree: Tree, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]
) -> str:
    """Replace and insert values."""
    splices = [
        Splice(tree.entries[key].start, tree.entries[key].end, spell_json(value))
        for key, value in replaced.items()
    ]
    for each in inserted:
        beside = tree.entries[each.beside]
        before = _SPACE.match(text[: beside.key_start][::-1])
        space = before.group()[::-1] if before else ""
        words = f",{space or ' '}{json.dumps(each.name)}: {spell_json(each.value)}"
        splices.append(Splice(beside.end, beside.end, words))
    return spliced(text, splices)


def spell_json(value: Value) -> str:
    """Write a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


class _Walk:
    """Walk a text that is known to be JSON, and note where values stand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decoder = json.JSONDecoder()
        self.entries: dict[Key, Entry] = {}
        self.groups: set[Key] = set()

    def value(self, key: Key, start: int, key_start: int) -> int:
        """Note the value that begins at a character; return where it ends."""
        opening = self._text[start]
        if opening == "{":
            return self._members(key, start, self._named(key))
        if opening == "[":
            count = iter(range(len(self._text)))

            def member(start: int) -> int:
                return self.value((*key, str(next(count))), start, start)

            return self._members(key, start, member)
        value, end = self._decoder.raw_decode(self._text, start)
        line = line_of(self._text, start)
        self.entries[key] = Entry(value=value, start=start, end=end, key_start=key_start, line=line)
        return end

    def _members(self, key: Key, start: int, member: Callable[[int], int]) -> int:
        """Read what is between two brackets."""
        self.groups.add(key)
        position = self._skip(start + 1)
        while self._text[position] not in "}]":
            position = self._skip(member(position))
            if self._text[position] == ",":
                position = self._skip(position + 1)
        return position + 1

    def _named(self, key: Key) -> Callable[[int], int]:
        names: set[str] = set()

        def member(start: int) -> int:
            name, end = self._decoder.raw_decode(self._text, start)
            if name in names:
                raise ConfigFileError(
                    f"the key {dotted((*key, name))} occurs twice, the second time in line "
                    f"{line_of(self._text, start)}"
                )
            names.add(name)
            colon = self._skip(end)
            return self.value((*key, name), self._skip(colon + 1), start)

        return member

    def _skip(self, position: int) -> int:
        found = _SPACE.match(self._text, position)
        return found.end() if found else position
