"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Get the installed version, or ``0+unknown`` when memfit runs from a plain source folder."""
    try:
        return version("memfit")
    except PackageNotFoundError:
        return "0+unknown"


__version__ = installed_version()
