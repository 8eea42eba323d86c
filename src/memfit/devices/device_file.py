"""A device's TOML file: one of the catalogue's, or a user's own for a card that is not in it.

Unknown keys are refused, so that a misspelt figure cannot pass for a missing one. A user's own file
may come from anywhere, so it is bounded in size and every figure in range, and what is wrong is
said in one line.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.units import GIB, MIB, TIB, format_bytes

from .calibration import Stamp, stamp_of
from .facts import OPTIONAL_FACTS, REQUIRED_FACTS, check_keys, check_text, read_fact, shown
from .spec import CPU, CUDA, ROCM, Device

SUFFIX = ".toml"
_REQUIRED_KEYS = ("title", "kind", "facts")
_OPTIONAL_KEYS = ("compute_capability", "cuda_names", "platform")
_MOST_FILE_BYTES = 64 * 1024
_MOST_TITLE_CHARACTERS = 100
_CAPABILITY = re.compile(r"\d{1,2}\.\d")
_RANGES = {
    "memory_bytes": (64 * MIB, 64 * TIB),
    "num_multiprocessors": (1, 100_000),
    "launch_seconds": (1e-9, 1.0),
    "_flops_per_second": (1e6, 1e19),
    "_bytes_per_second": (1e6, 1e17),
    "_bytes": (0, 64 * GIB),
}
"""What a figure of a user's own file may be, by its name or by how the name ends."""


def is_own_file(name: str) -> bool:
    """Return whether a device is named by a file of the user's own."""
    return name.lower().endswith(SUFFIX)


def read_own_device(name: str) -> Device:
    """Read a device from a user's own file; it has the path as its name, so that it is found again.

    Raises:
        DataError: if there is no such file, or it does not describe a card.
    """
    path = Path(name)
    return _device_of_file(name, _stamp_of_file(name, path))


def own_text(name: str) -> str:
    """Return the text of a user's own file, which says all that is known of the device.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(name, f"it cannot be read: {error}") from error


def check_own_device(name: str, text: str) -> Device:
    """Read a device from the text of a user's own file, and check what nobody else has checked.

    Raises:
        DataError: if it does not describe a card.
    """
    device = parse_device(name, text, path=name)
    if device.kind != CUDA:
        raise DataError(
            name, f"kind is {device.kind!r}; a file of your own describes a 'cuda' card"
        )
    if device.platform == CUDA and device.compute_capability is None:
        raise DataError(name, 'compute_capability is missing; write it as "8.6"')
    for fact_name, fact in device.facts.items():
        lowest, highest = next(
            bounds for ending, bounds in _RANGES.items() if fact_name.endswith(ending)
        )
        if not lowest <= fact.value <= highest:
            raise DataError(
                name,
                f"{fact_name}.value is {shown(fact.value)}; it must be between {lowest:.4g} and "
                f"{highest:.4g}, without prefixes such as giga",
            )
    if device.value("context_bytes") >= device.memory_bytes:
        raise DataError(
            name, f"context_bytes leaves nothing of {format_bytes(device.memory_bytes)}"
        )
    return device


def parse_device(name: str, text: str, *, path: str | None = None) -> Device:
    """Read a device from the text of its file.

    Raises:
        DataError: if a key is unknown or missing, or a value has the wrong type.
    """
    path = path or f"{name}{SUFFIX}"
    return device_of_table(name, read_table(path, text), path)


def device_of_table(name: str, table: Mapping[str, Any], path: str) -> Device:
    """Make a device of the table in its file.

    Raises:
        DataError: if a key is unknown or missing, or a value has the wrong type.
    """
    facts = table["facts"]
    check_keys(path, "facts", facts, REQUIRED_FACTS, OPTIONAL_FACTS)
    check_text(path, "title", table["title"], _MOST_TITLE_CHARACTERS)
    if table["kind"] not in (CPU, CUDA):
        raise DataError(path, f"kind is {shown(table['kind'])}; it must be {CPU!r} or {CUDA!r}")
    platform = table.get("platform", table["kind"])
    if platform not in ((CPU,) if table["kind"] == CPU else (CUDA, ROCM)):
        raise DataError(path, f"platform is {shown(platform)}; it must be {CUDA!r} or {ROCM!r}")
    return Device(
        name=name,
        title=table["title"],
        kind=table["kind"],
        platform=platform,
        compute_capability=_capability(path, table.get("compute_capability")),
        facts={key: read_fact(path, key, value) for key, value in facts.items()},
    )


def read_table(path: str, text: str) -> dict[str, Any]:
    """Parse a device's file and check its outermost keys.

    Raises:
        DataError: if it is no TOML, or a key is unknown or missing.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise DataError(path, "it is not valid TOML: nested too deeply") from None
    except ValueError as error:  # tomllib's own, and Python's for a number of thousands of digits
        raise DataError(path, f"it is not valid TOML: {error}") from error
    check_keys(path, "the file", table, _REQUIRED_KEYS, _OPTIONAL_KEYS)
    names = table.get("cuda_names", [])
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise DataError(path, "cuda_names must be a list of names as the driver writes them")
    return table


def _capability(path: str, found: object) -> str | None:
    """Check a compute capability."""
    if found is None:
        return None
    if not isinstance(found, str) or not _CAPABILITY.fullmatch(found):
        raise DataError(path, 'compute_capability must be a text such as "8.6"')
    return found


@cache
def _device_of_file(name: str, stamp: Stamp) -> Device:
    """Read a file once; one that has changed has another stamp."""
    try:
        with stamp.path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
        if len(content) > _MOST_FILE_BYTES:
            found = f"it has more than {format_bytes(_MOST_FILE_BYTES)}, which is no device's file"
            raise DataError(name, found)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(name, f"it cannot be read: {error}") from error
    return check_own_device(name, text)


def _stamp_of_file(name: str, path: Path) -> Stamp:
    """Look at a file before it is opened: a pipe would never end.

    Raises:
        DataError: if there is none, or it is no regular file.
    """
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        stamp = stamp_of(path) if is_file else None
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            found = f"there is no such file; `memfit devices --new {name}` writes one"
        else:
            found = f"it cannot be read: {error}"
        raise DataError(name, found) from error
    if stamp is None:
        raise DataError(name, "it is no regular file; a device is described by a TOML file")
    return stamp
