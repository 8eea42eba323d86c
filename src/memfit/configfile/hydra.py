"""Hydra trees: a configuration whose ``defaults`` list brings in files of its folder.

Source: https://hydra.cc/docs/advanced/defaults_list/ and .../overriding_packages/, for version 1.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .document import Document, read_document
from .tree import Key

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_WORDS_BEFORE = re.compile(r"^(?:optional|override)\s+")
CONFIG_NAME = "config.yaml"
CURRICULUM_FOLDERS = ("curriculum", "text_curriculum")
_MOST_LEVELS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A file, and the group that its keys are in when the configuration is put together."""

    document: Document
    package: Key = ()


def parts_of(document: Document) -> list[Part]:
    """Return a file, and the files that its defaults list brings in."""
    return [Part(document), *_below(document, (), document.path.parent, _MOST_LEVELS)]


def stage_files(config: Path) -> list[Path]:
    """List the stage and chain files of the curricula beside a configuration."""
    folders = (config.parent / name for name in CURRICULUM_FOLDERS)
    return [file for folder in folders for file in sorted(folder.glob("*.yaml"))]


def _below(document: Document, package: Key, root: Path, levels: int) -> Iterator[Part]:
    if levels == 0 or document.format != "YAML":
        return
    for group, option in _choices(document):
        folder, _, named = group.partition("@")
        start = root if folder.startswith("/") else document.path.parent
        base = start / folder.strip("/")
        path = base / f"{option.removesuffix('.yaml')}.yaml"
        if not path.is_file():
            continue
        found = read_document(path)
        place = _package(found, package, folder.strip("/"), named)
        yield Part(found, place)
        yield from _below(found, place, root, levels - 1)


def _choices(document: Document) -> Iterator[tuple[str, str]]:
    """Yield each group of the defaults list with the option that is chosen."""
    for key, entry in document.tree.entries.items():
        if key[0] != "defaults" or not isinstance(entry.value, str) or "${" in entry.value:
            continue
        if len(key) == 2 and entry.value != "_self_":
            yield "", entry.value
        elif len(key) >= 3 and not key[2].startswith("override "):
            yield _WORDS_BEFORE.sub("", key[2]), entry.value


def _package(document: Document, outer: Key, folder: str, named: str) -> Key:
    """Tell the group that a file's keys are put in."""
    header = _PACKAGE.search(document.text)
    word = named or (header[1] if header else "")
    if word == "_global_":
        return ()
    if word and word not in {"_group_", "_here_"}:
        return tuple(word.removeprefix("_global_.").split("."))
    parts = tuple(part for part in folder.split("/") if part)
    return outer if word == "_here_" else (*outer, *parts)
