"""Installed packages, read from their metadata without importing them.

The first folder of the search path that has a package wins, as with ``import``. Metadata that
cannot be read is a finding, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# What the parts of a distribution raise when its files are cut off, missing or no text.
_UNREADABLE = (AttributeError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed package."""

    name: str
    """As pip compares names: lower case, with ``-``."""
    version: str
    folder: Path
    """The folder that holds it, such as ``site-packages``."""
    metadata_folder: Path
    requires: tuple[str, ...] = ()
    """Its requirement lines."""

    @property
    def title(self) -> str:
        """Name and version, as one says them."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, kw_only=True)
class Packages:
    """What is installed on a search path."""

    by_name: dict[str, Package]
    shadowed: tuple[Package, ...]
    """Further copies of packages, which are not imported."""
    unreadable: tuple[Path, ...]
    """Metadata folders that tell no name or version."""

    def get(self, name: str) -> Package | None:
        """Return the package that an import would find."""
        return self.by_name.get(canonical(name))


def canonical(name: str) -> str:
    """Write a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_packages(search_paths: Iterable[Path]) -> Packages:
    """Read what is installed in these folders."""
    by_name: dict[str, Package] = {}
    shadowed: list[Package] = []
    unreadable: list[Path] = []
    for folder in _distinct(search_paths):
        for each in _metadata_folders(folder):
            package = _read(folder, each)
            if package is None:
                unreadable.append(each)
            elif package.name in by_name:
                shadowed.append(package)
            else:
                by_name[package.name] = package
    return Packages(by_name=by_name, shadowed=tuple(shadowed), unreadable=tuple(unreadable))


def _distinct(search_paths: Iterable[Path]) -> Iterator[Path]:
    """Yield each folder once; ``lib64`` is often a link to ``lib``."""
    seen = set()
    for folder in search_paths:
        real = folder.resolve()
        if real not in seen:
            seen.add(real)
            yield folder


def _metadata_folders(folder: Path) -> list[Path]:
    """List the metadata in a folder; a zip file or a folder that is gone has none.

    pip renames what it is about to delete, so that its name begins with ``~``.
    """
    try:
        found = [*folder.glob("*.dist-info"), *folder.glob("*.egg-info")]
    except OSError:
        return []
    return sorted(path for path in found if not path.name.startswith("~"))


def _read(folder: Path, metadata_folder: Path) -> Package | None:
    """Read one package; None where its metadata tells no name or version."""
    found = metadata.PathDistribution(metadata_folder)
    try:
        name, version = found.metadata["Name"], found.version
        requires = tuple(found.requires or ())
    except _UNREADABLE:
        return None
    if not name or not version:
        return None
    return Package(
        name=canonical(name),
        version=version,
        folder=folder,
        metadata_folder=metadata_folder,
        requires=requires,
    )
