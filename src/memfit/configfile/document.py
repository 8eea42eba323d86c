"""A configuration file: read, edited, and held to what was meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from memfit.errors import ConfigFileError
from memfit.journal.plain_text import read_plain

from .json_text import edit_json, read_json
from .python_text import edit_python, read_python
from .toml_text import edit_toml, read_toml
from .tree import Insertion, Key, Scalar, Tree, Value, dotted, expected_values, same_values
from .yaml_text import edit_yaml, read_yaml

_BYTE_ORDER_MARK = "\ufeff"
_Edit = Callable[[str, Tree, Mapping[Key, Value], Sequence[Insertion]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    name: str
    read: Callable[[str], Tree]
    edit: _Edit


_YAML = _Format(name="YAML", read=read_yaml, edit=edit_yaml)
_FORMATS = {
    ".yaml": _YAML,
    ".yml": _YAML,
    ".json": _Format(name="JSON", read=read_json, edit=edit_json),
    ".toml": _Format(name="TOML", read=read_toml, edit=edit_toml),
    ".py": _Format(name="Python", read=read_python, edit=edit_python),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file as it was read."""

    path: Path
    content: bytes
    text: str
    """Without a byte order mark, which is kept."""
    tree: Tree
    format: str

    def entry_obstacle(self, key: Key) -> str:
        """Say why a value cannot be changed by itself; empty where it can."""
        entry = self.tree.entries[key]
        if isinstance(entry.value, str) and "${" in entry.value:
            return f"it is computed, as {entry.value}"
        return entry.obstacle

    def edited(self, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]) -> bytes:
        """Return the content with other values, and not one more changed.

        Raises:
            ConfigFileError: if a value cannot be changed by itself, or the outcome would say
                anything else than was meant.
        """
        for key in replaced:
            if obstacle := self.entry_obstacle(key):
                self._refuse(key, obstacle)
        for each in inserted:
            if obstacle := self.tree.closed.get(each.key[:-1], ""):
                self._refuse(each.key, f"it would have to be added, and {obstacle}")
        found = _FORMATS[self.path.suffix.lower()]
        text = found.edit(self.text, self.tree, replaced, inserted)
        if not _says(found, text, expected_values(self.tree, replaced, inserted)):
            names = ", ".join(map(dotted, [*replaced, *(each.key for each in inserted)]))
            raise ConfigFileError(
                f"changing {names} would change more than that; change them by hand", self.path
            )
        mark = _BYTE_ORDER_MARK if self.content.startswith(_BYTE_ORDER_MARK.encode()) else ""
        return (mark + text).encode()

    def _refuse(self, key: Key, obstacle: str) -> None:
        entry = self.tree.entries.get(key)
        where = f" (line {entry.line})" if entry is not None and entry.line else ""
        raise ConfigFileError(
            f"{dotted(key)}{where} cannot be changed by itself: {obstacle}. "
            "Write the value there by hand, or name another key with --mapping",
            self.path,
        )


def _says(form: _Format, text: str, expected: Mapping[Key, Scalar]) -> bool:
    """Return whether a text can be read and says this, and nothing else."""
    try:
        return same_values(form.read(text).values(), expected)
    except ConfigFileError:
        return False


def read_document(path: Path) -> Document:
    """Read a configuration file.

    Raises:
        ConfigFileError: if it is missing, of no known format, or does not parse.
    """
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise ConfigFileError(
            f"{path.suffix or 'a file without a suffix'} is no format that memfit edits; it edits "
            f"{', '.join(_FORMATS)}",
            path,
        )
    try:
        content = read_plain(path).encode()
        text = content.decode().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise ConfigFileError(error.strerror or "it cannot be opened", path) from None
    except ValueError as error:
        raise ConfigFileError(str(error), path) from None
    try:
        tree = found.read(text)
    except ConfigFileError as error:
        raise ConfigFileError(error.reason, path) from None
    return Document(path=path, content=content, text=text, tree=tree, format=found.name)


def diff_of(name: str, before: bytes, after: bytes) -> str:
    """Write the difference between two contents as people and ``patch`` read it."""
    old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
    shown = []
    for line in unified_diff(old, new, fromfile=f"a/{name}", tofile=f"b/{name}"):
        ended = line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        shown.append(ended)
    return "".join(shown)
