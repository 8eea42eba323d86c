"""The catalogue: one TOML file per device, read into ``Device`` and checked.

A name is the file's name without its ending, or anything that means no other device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from memfit.errors import AmbiguousDeviceError, UnknownDeviceError
from memfit.figures import Certainty
from memfit.units import GIB

from .calibration import Stamp, calibration_path, read_calibration, stamp_of, with_calibration
from .detect import CudaDevice, Host, host, host_memory_bytes
from .device_file import SUFFIX, device_of_table, is_own_file, read_own_device, read_table
from .names import find, why_not_covered
from .spec import CPU, Device, Fact

# Drivers and ECC move a card's memory by up to 7 %; cards that share a name differ by a sixth.
_MEMORY_TOLERANCE_FRACTION = 0.1
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
    """Load a device by its name, or from a TOML file of the user's own by its path.

    ``cpu`` gets the memory of this machine. What ``memfit calibrate`` measured here takes the place
    of the catalogue's figures.

    Raises:
        UnknownDeviceError: if the catalogue has no such device, or several that may be meant.
        DataError: if the device's file, or the file of its measured figures, is malformed.
    """
    if is_own_file(name):
        return read_own_device(name)
    device = catalogued_device(name)
    stamp = stamp_of(calibration_path(device.name))
    return device if stamp is None else _calibrated_device(device.name, stamp)


@cache
def catalogued_device(name: str) -> Device:
    """Load a device by its name, without what was measured on this machine.

    Raises:
        UnknownDeviceError: if the catalogue has no such device, or several that may be meant.
        DataError: if the device's file is malformed.
    """
    files = _files()
    if name in files:
        return _with_own_memory(device_of_table(name, _table(name), f"{name}{SUFFIX}"))
    why = why_not_covered(name)
    if why is not None:
        raise UnknownDeviceError(name, (), why)
    match = find(name, files, _other_names)
    if match.name is not None:
        return catalogued_device(match.name)
    if match.variants:
        sizes = {each: catalogued_device(each).memory_bytes for each in match.variants}
        raise AmbiguousDeviceError(name, sizes)
    raise UnknownDeviceError(name, files)


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


@cache
def _files() -> Mapping[str, Traversable]:
    """Find the catalogue's files by device name."""
    folder = resources.files(__package__) / "data"
    return {
        file.name.removesuffix(SUFFIX): file
        for file in folder.iterdir()
        if file.name.endswith(SUFFIX)
    }


@cache
def _names_by_cuda_name() -> Mapping[str, tuple[str, ...]]:
    """List the devices behind each name that a CUDA driver may give."""
    found: dict[str, tuple[str, ...]] = {}
    for name in device_names():
        for cuda_name in _cuda_names(name):
            found[cuda_name] = (*found.get(cuda_name, ()), name)
    return found


def _other_names(name: str) -> Iterator[str]:
    """Yield what else a device of the catalogue is called."""
    yield catalogued_device(name).title
    yield from _cuda_names(name)


def _cuda_names(name: str) -> tuple[str, ...]:
    """Return the names that drivers give a device."""
    return tuple(_table(name).get("cuda_names", ()))


@cache
def _table(name: str) -> Mapping[str, Any]:
    """Parse a file of the catalogue."""
    return read_table(f"{name}{SUFFIX}", _files()[name].read_text(encoding="utf-8"))


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
