"""The catalogue: one TOML file per device, read into ``Device`` and checked.

A name is the file's name without its ending. Unknown keys are refused, so that a misspelt figure
cannot pass for a missing one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from memfit.errors import DataError, UnknownDeviceError
from memfit.figures import Certainty
from memfit.units import GIB

from .calibration import Stamp, calibration_path, read_calibration, stamp_of, with_calibration
from .detect import CudaDevice, Host, host, host_memory_bytes
from .facts import OPTIONAL_FACTS as OPTIONAL_FACTS
from .facts import REQUIRED_FACTS as REQUIRED_FACTS
from .facts import check_keys, read_fact
from .spec import CPU, CUDA, Device, Fact

_REQUIRED_KEYS = ("title", "kind", "facts")
_OPTIONAL_KEYS = ("compute_capability", "cuda_names")

# Drivers and ECC move a card's memory by up to 7 %; cards that share a name differ by a third.
_MEMORY_TOLERANCE_FRACTION = 0.1
_WITH_MEMORY = re.compile(r"(?P<card>.+)-(?P<gigabytes>\d+)gb")
_ASSUMED_HOST_MEMORY_BYTES = 8 * GIB
_ASSUMED = "Guess: this system does not tell its memory; pass a budget to replace it"
_READ_HERE = "read from this machine: the host's memory or the container's limit"


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, sorted."""
    return tuple(sorted(_files()))


def all_devices() -> tuple[Device, ...]:
    """Load every device, sorted by name."""
    return tuple(load_device(name) for name in device_names())


def load_device(name: str) -> Device:
    """Load a device by its name; ``cpu`` gets the memory of this machine.

    What ``memfit calibrate`` measured here takes the place of the catalogue's figures.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        DataError: if the device's file, or the file of its measured figures, is malformed.
    """
    device = catalogued_device(name)
    stamp = stamp_of(calibration_path(device.name))
    return device if stamp is None else _calibrated_device(device.name, stamp)


@cache
def catalogued_device(name: str) -> Device:
    """Load a device by its name, without what was measured on this machine.

    A card's memory may be added to the name that the catalogue has: ``a10-24gb`` is ``a10``.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        DataError: if the device's file is malformed.
    """
    files = _files()
    if name in files:
        return _with_own_memory(parse_device(name, files[name].read_text(encoding="utf-8")))
    parts = _WITH_MEMORY.fullmatch(name)
    if parts is not None and parts["card"] in files:
        device = catalogued_device(parts["card"])
        told_bytes = int(parts["gigabytes"]) * 10**9
        if abs(device.memory_bytes - told_bytes) <= _MEMORY_TOLERANCE_FRACTION * told_bytes:
            return device
    raise UnknownDeviceError(name, files)


def parse_device(name: str, text: str) -> Device:
    """Read a device from the text of its file.

    Raises:
        DataError: if a key is unknown or missing, or a value has the wrong type.
    """
    path = f"{name}.toml"
    table = _read_table(path, text)
    facts = table["facts"]
    check_keys(path, "facts", facts, REQUIRED_FACTS, OPTIONAL_FACTS)
    if table["kind"] not in (CPU, CUDA):
        raise DataError(path, f"kind is {table['kind']!r}; it must be {CPU!r} or {CUDA!r}")
    return Device(
        name=name,
        title=table["title"],
        kind=table["kind"],
        compute_capability=table.get("compute_capability"),
        facts={key: read_fact(path, key, value) for key, value in facts.items()},
    )


def catalogue_name(cuda_device: CudaDevice) -> str | None:
    """Find the catalogue's name for a CUDA device; None when it is not in the catalogue.

    The driver's name must be listed in a device's ``cuda_names`` letter by letter, and the memory
    must agree, as cards of different memory may share a name.
    """
    for name in _names_by_cuda_name().get(cuda_device.name, ()):
        expected_bytes = catalogued_device(name).memory_bytes
        difference_bytes = abs(cuda_device.memory_bytes - expected_bytes)
        if difference_bytes <= _MEMORY_TOLERANCE_FRACTION * expected_bytes:
            return name
    return None


def current_device_name(machine: Host | None = None) -> str:
    """Return the name of the device that a job would use here: the first CUDA device, or ``cpu``.

    Raises:
        UnknownDeviceError: if the first CUDA device is not in the catalogue.
    """
    machine = host() if machine is None else machine
    if not machine.cuda_devices:
        return CPU
    first = machine.cuda_devices[0]
    name = catalogue_name(first)
    if name is None:
        raise UnknownDeviceError(first.name, device_names())
    return name


@cache
def _calibrated_device(name: str, stamp: Stamp) -> Device:
    """Load a device with the measured figures; a file that has changed has another stamp."""
    return with_calibration(catalogued_device(name), read_calibration(stamp.path))


def _files() -> dict[str, Traversable]:
    """Find the catalogue's files by device name."""
    folder = resources.files(__package__) / "data"
    suffix = ".toml"
    return {
        file.name.removesuffix(suffix): file
        for file in folder.iterdir()
        if file.name.endswith(suffix)
    }


@cache
def _names_by_cuda_name() -> Mapping[str, tuple[str, ...]]:
    """List the devices behind each name that a CUDA driver may give."""
    found: dict[str, tuple[str, ...]] = {}
    for name, file in sorted(_files().items()):
        table = _read_table(f"{name}.toml", file.read_text(encoding="utf-8"))
        for cuda_name in table.get("cuda_names", ()):
            found[cuda_name] = (*found.get(cuda_name, ()), name)
    return found


def _read_table(path: str, text: str) -> dict[str, Any]:
    """Parse a device's file and check its outermost keys."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(path, f"it is not valid TOML: {error}") from error
    check_keys(path, "the file", table, _REQUIRED_KEYS, _OPTIONAL_KEYS)
    return table


def _with_own_memory(device: Device) -> Device:
    """Fill in this machine's memory where the file says 0."""
    if device.memory_bytes:
        return device
    found_bytes = host_memory_bytes()
    read_on = date.today().isoformat()
    certainty, source = Certainty.EXACT, _READ_HERE
    if found_bytes is None:
        found_bytes, certainty, source = _ASSUMED_HOST_MEMORY_BYTES, Certainty.GUESS, _ASSUMED
    memory = Fact(value=found_bytes, source=source, read_on=read_on, certainty=certainty.value)
    return replace(device, facts={**device.facts, "memory_bytes": memory})
