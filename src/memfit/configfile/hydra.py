"""Hydra trees: a configuration whose ``defaults`` list brings in files of its folder.

Source: https://hydra.cc/docs/advanced/defaults_list/ and .../overriding_packages/, for version 1.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.errors import ConfigFileError

from .document import Document, read_document
from .tree import Key

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_OVERRIDE, _OPTIONAL, _SELF = "override ", "optional ", "_self_"
_HYDRAS_OWN = "hydra"
CONFIG_NAME = "config.yaml"
CURRICULUM_FOLDERS = ("curriculum", "text_curriculum")
_MOST_LEVELS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A file, and the group that its keys are in when the configuration is put together."""

    document: Document
    package: Key = ()
    order: int = 0
    """When it is put in: of two files that set a key the later one counts."""
    twin: Key | None = None
    """Another group that the file is put in as well."""


def parts_of(document: Document) -> list[Part]:
    """Return a file, and then the files that its defaults list brings in."""
    parts, overrides = _put_together(document, {})
    if overrides:  # what one of the files chooses in the place of another's choice
        parts, _ = _put_together(document, overrides)
    ordered = [replace(part, order=order) for order, part in enumerate(parts)]
    return sorted(ordered, key=lambda part: part.document is not document)


def stage_files(config: Path) -> list[Path]:
    """List the stage and chain files of the curricula beside a configuration."""
    folders = (config.parent / name for name in CURRICULUM_FOLDERS)
    return [file for folder in folders for file in sorted(folder.glob("*.yaml"))]


def _put_together(
    document: Document, overrides: Mapping[Path, str]
) -> tuple[list[Part], dict[Path, str]]:
    composition = _Composition(document.path.parent, overrides)
    return list(composition.parts(document, (), _MOST_LEVELS)), composition.found


class _Composition:
    """Follow defaults lists from a primary configuration, in the order of the outcome."""

    def __init__(self, root: Path, overrides: Mapping[Path, str]) -> None:
        self._root = root
        self._overrides = overrides
        self.found: dict[Path, str] = {}

    def parts(self, document: Document, package: Key, levels: int) -> Iterator[Part]:
        """Yield what a file brings in, and itself: at ``_self_``, or last."""
        own = Part(document, package)
        has_own_place = False
        for group, option in _choices(document):
            if option == _SELF:
                has_own_place = True
                yield own
            elif group.startswith(_OVERRIDE):
                self._override(document, group.removeprefix(_OVERRIDE), option)
            elif levels:
                yield from self._chosen(document, package, (group, option), levels)
        if not has_own_place:
            yield own

    def _override(self, document: Document, group: str, option: str) -> None:
        if not group.strip("/").startswith(_HYDRAS_OWN):
            self.found[self._folder(document, group)] = option

    def _chosen(
        self, document: Document, outer: Key, choice: tuple[str, str], levels: int
    ) -> Iterator[Part]:
        group, option = choice
        folder, _, named = group.partition("@")
        base = self._folder(document, folder)
        option = self._overrides.get(base, option) if folder else option
        path = base / f"{option.removesuffix('.yaml')}.yaml"
        if path.is_file():
            found = read_document(path)
            package = _package(found, outer, folder.strip("/"), named)
            yield from self.parts(found, package, levels - 1)

    def _folder(self, document: Document, group: str) -> Path:
        start = self._root if group.startswith("/") else document.path.parent
        return start / group.strip("/")


def _choices(document: Document) -> Iterator[tuple[str, str]]:
    """Yield each group of the defaults list with the option that is chosen.

    Raises:
        ConfigFileError: if a choice is computed, so that a file may be missed.
    """
    if document.format != "YAML":
        return
    for key, entry in document.tree.entries.items():
        if key[0] != "defaults" or not isinstance(entry.value, str):
            continue
        if "${" in "".join((*key, entry.value)):
            raise ConfigFileError(
                f"the defaults list chooses {entry.value} (line {entry.line}), which is known when "
                "the program runs. Write the choice out, or give the chosen files themselves",
                document.path,
            )
        if len(key) == 2:
            yield "", entry.value
        elif len(key) >= 3:
            yield key[2].removeprefix(_OPTIONAL), entry.value


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
