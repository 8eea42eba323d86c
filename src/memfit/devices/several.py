"""Reads which devices are meant by words that may mean several: ``all``, lists, patterns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from memfit.errors import UsageError

from .catalogue import all_devices, device_names, load_device
from .device_file import is_own_file
from .spec import CUDA, Device

ALL = "all"
"""Means every card; ``cpu`` is none."""


def devices_meant(words: Iterable[str]) -> list[Device]:
    """Load the devices that words name, each once, in their order.

    A word is a name as ``load_device`` takes it, several with commas between them, a pattern such
    as ``rtx-40*``, or ``all``.

    Raises:
        UnknownDeviceError: if a name means no device, or several.
        UsageError: if a pattern matches none.
        DataError: if a file of the user's own is malformed.
    """
    found = (device for word in words for name in _parts(word) for device in _named(name))
    return list({device.name: device for device in found}.values())


def _parts(word: str) -> list[str]:
    """Part a list of names; the path of one file may have commas of its own."""
    if is_own_file(word) and Path(word).is_file():
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()] or [word]


def _named(name: str) -> Iterator[Device]:
    """Yield what one name means."""
    if name.lower() == ALL:
        yield from (device for device in all_devices() if device.kind == CUDA)
    elif is_own_file(name) or not set(name) & set("*?["):
        yield load_device(name)
    else:
        names = [each for each in device_names() if fnmatchcase(each, name.lower())]
        if not names:
            raise UsageError(
                f"No device is named like {name!r}. `memfit devices` lists the names; a pattern "
                "such as rtx-40* has to match a whole one."
            )
        yield from map(load_device, names)
