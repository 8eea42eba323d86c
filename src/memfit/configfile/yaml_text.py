"""YAML: the text of a scalar is replaced where it stands.

A library that loads YAML and writes it again loses alignment, quotes and blank lines in some file
or other. Here ruamel.yaml only says where each value stands. It reads YAML as version 1.1, as the
trainers' own loader (PyYAML) does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from memfit.errors import ConfigFileError
from memfit.journal.plain_yaml import bounded_yaml, check_yaml_extent

from .tree import Entry, Insertion, Key, Scalar, Splice, Tree, Value, dotted, line_break_of, spliced

_CORE = "tag:yaml.org,2002:"
_PROPERTIES = re.compile(r"(?:[&!][^\s]*[ \t]+)*")
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9]*)$")
_NUMBER = re.compile(r"[-+]?[0-9.][0-9.eE+_-]*$")
_WORDS = {"null", "~", "true", "false", "yes", "no", "on", "off", "y", "n"}
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*$")
_MOST_VALUES = 100_000
"""Aliases within aliases multiply; nobody writes so many settings."""
_MOST_LEVELS = 100


def read_yaml(text: str) -> Tree:
    """Read YAML; several documents are told apart by their number.

    Raises:
        ConfigFileError: if it is none, or a key occurs twice.
    """
    yaml = bounded_yaml(refuses_aliases=False)
    yaml.version = (1, 1)
    try:
        check_yaml_extent(text)
        documents = list(yaml.compose_all(text))
    except YAMLError as error:
        raise ConfigFileError(f"it is no YAML: {_first_words(error)}") from None
    except ValueError as error:
        raise ConfigFileError(str(error)) from None
    walk = _Walk(text)
    several = len(documents) > 1
    for number, document in enumerate(documents):
        if document is not None:
            walk.count(document)
            walk.node((str(number),) if several else (), document, None, "")
    if several:
        walk.groups.add(())
        walk.closed[()] = "the file holds several documents"
    return Tree(
        entries=walk.entries,
        groups=frozenset(walk.groups),
        inline=frozenset(walk.inline),
        closed=walk.closed,
    )


def edit_yaml(
    text: str, tree: Tree, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]
) -> str:
    """Replace and insert values."""
    splices = []
    for key, value in replaced.items():
        entry = tree.entries[key]
        old = text[entry.start : entry.end]
        splices.append(Splice(entry.start, entry.end, spell_yaml(value, old)))
    splices += [_insertion(text, tree, each) for each in inserted]
    return spliced(text, splices)


def spell_yaml(value: Value, old: str = "") -> str:
    """Write a value as YAML, in the quotes and the capitals of what it replaces."""
    if isinstance(value, dict):
        inside = ", ".join(f"{name}: {spell_yaml(part)}" for name, part in value.items())
        return f"{{{inside}}}"
    if isinstance(value, bool):
        word = "true" if value else "false"
        return word.capitalize() if old[:1] in {"T", "F"} else word
    text = str(value)
    if old[:1] in {"'", '"'}:
        return f"{old[0]}{text}{old[0]}"
    if isinstance(value, str) and (not _PLAIN.match(text) or _looks_otherwise(text)):
        return f'"{text}"'
    return text


def _looks_otherwise(text: str) -> bool:
    return bool(_NUMBER.match(text)) or text.lower() in _WORDS


def _insertion(text: str, tree: Tree, wanted: Insertion) -> Splice:
    """Write a key behind another one: on a line of its own, or within the brackets."""
    beside = tree.entries[wanted.beside]
    words = f"{wanted.name}: {spell_yaml(wanted.value)}"
    if wanted.beside[:-1] in tree.inline:
        return Splice(beside.end, beside.end, f", {words}")
    line_start = text.rfind("\n", 0, beside.key_start) + 1
    indent = " " * len(text[line_start : beside.key_start])
    line_break = line_break_of(text)
    line_end = text.find("\n", beside.end)
    if line_end < 0:
        return Splice(len(text), len(text), f"{line_break}{indent}{words}")
    return Splice(line_end + 1, line_end + 1, f"{indent}{words}{line_break}")


def _first_words(error: YAMLError) -> str:
    """Write a parser's message in one line, with the line it is about."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1})" if mark is not None else str(problem)


class _Walk:
    """Walk the nodes of a document, and note where scalars stand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._num_uses: dict[int, int] = {}
        self.entries: dict[Key, Entry] = {}
        self.groups: set[Key] = set()
        self.inline: set[Key] = set()
        self.closed: dict[Key, str] = {}

    def count(self, node: Any) -> None:
        """Count how often each node is used: more than once where aliases lead to it."""
        seen = self._num_uses.get(id(node), 0)
        self._num_uses[id(node)] = seen + 1
        if seen:
            return
        if isinstance(node, MappingNode):
            for _, value in node.value:
                self.count(value)
        elif isinstance(node, SequenceNode):
            for value in node.value:
                self.count(value)

    def node(self, key: Key, node: Any, key_node: Any, obstacle: str) -> None:
        """Note a node and what is below it."""
        if self._num_uses.get(id(node), 1) > 1 and not obstacle:
            obstacle = (
                f"its value is shared by several keys through the anchor &{node.anchor} "
                f"(line {node.start_mark.line + 1}) and its aliases"
            )
        if len(self.entries) > _MOST_VALUES or len(key) > _MOST_LEVELS:
            raise ConfigFileError("its aliases lead to ever more values")
        if isinstance(node, ScalarNode):
            self.entries[key] = self._scalar(node, key_node, obstacle)
            return
        self.groups.add(key)
        if obstacle:
            self.closed[key] = obstacle
        if node.flow_style:
            self.inline.add(key)
        if isinstance(node, MappingNode):
            self._mapping(key, node, obstacle)
        else:
            for number, child in enumerate(node.value):
                self.node((*key, str(number)), child, child, obstacle)

    def _mapping(self, key: Key, node: Any, obstacle: str) -> None:
        merged = [value for name, value in node.value if name.tag == f"{_CORE}merge"]
        names: set[str] = set()
        for name, value in node.value:
            if name.tag == f"{_CORE}merge":
                continue
            word = str(name.value) if isinstance(name, ScalarNode) else "?"
            if word in names:
                raise ConfigFileError(
                    f"the key {dotted((*key, word))} occurs twice, the second time in line "
                    f"{name.start_mark.line + 1}"
                )
            names.add(word)
            self.node((*key, word), value, name, obstacle)
        for source in merged:
            self._merged(key, source, names)

    def _merged(self, key: Key, source: Any, names: set[str]) -> None:
        """Note what a merge brings in, and that it cannot be changed there."""
        if isinstance(source, SequenceNode):
            for each in source.value:
                self._merged(key, each, names)
            return
        if not isinstance(source, MappingNode):
            return
        obstacle = f"its value comes from elsewhere, through the merge <<: *{source.anchor}"
        for name, value in source.value:
            if name.tag == f"{_CORE}merge":
                self._merged(key, value, names)
                continue
            word = str(name.value) if isinstance(name, ScalarNode) else "?"
            if word not in names:
                names.add(word)
                self.node((*key, word), value, name, obstacle)

    def _scalar(self, node: Any, key_node: Any, obstacle: str) -> Entry:
        start, end = node.start_mark.index, node.end_mark.index
        if node.anchor or self._text[start : start + 1] in {"&", "!"}:
            properties = _PROPERTIES.match(self._text, start, end)
            start = properties.end() if properties else start
        if "\n" in self._text[start:end] or node.style in {"|", ">"}:
            obstacle = obstacle or "its value runs over several lines"
        return Entry(
            value=_value_of(node),
            start=start,
            end=end,
            key_start=-1 if key_node is None else key_node.start_mark.index,
            line=node.start_mark.line + 1,
            obstacle=obstacle,
            is_quoted=node.style in {"'", '"'},
        )


def _value_of(node: Any) -> Scalar:
    """Read a scalar as PyYAML does; a number in another notation stays the text that it is."""
    kind, text = node.tag.removeprefix(_CORE), node.value
    if kind == "int" and _DECIMAL.match(text):
        return int(text)
    if kind == "bool":
        return text.lower() in {"true", "yes", "on", "y"}
    if kind == "null":
        return None
    return f"{text}" if kind == "str" else f"!{kind} {text}"
