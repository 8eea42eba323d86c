"""Which catalogue device a row's card is; names of cards are written in several ways."""

from __future__ import annotations

from memfit.devices.catalogue import catalogue_name, catalogued_device, device_names
from memfit.devices.detect import CudaDevice
from memfit.devices.spec import CUDA, Device

from .packages import CannotRebuild
from .rows import Row

# What people leave out of a driver's name: "RTX 3060" is "NVIDIA GeForce RTX 3060".
_LEFT_OUT = ("", "NVIDIA ", "NVIDIA GeForce ", "GeForce ", "Tesla ")


def card_of_row(row: Row) -> Device:
    """Find the catalogue device on which a row was measured.

    Where the row does not tell the card's memory, the name alone decides if it can.

    Raises:
        CannotRebuild: if the row names no card, an unknown one, or one of several.
    """
    if not row.device:
        raise CannotRebuild("it names no device")
    found = _named(row.device, row.device_total_bytes)
    if len(found) == 1:
        return catalogued_device(found.pop())
    if found:
        reason = f"the device {row.device!r} may be {' or '.join(sorted(found))}"
    else:
        reason = f"the device {row.device!r} is not in the catalogue ({', '.join(_cards())})"
    raise CannotRebuild(reason)


def _named(name: str, total_bytes: int | None) -> set[str]:
    """Return the catalogue names of all cards with a driver's name, a title or a catalogue name."""
    found = {each for each in _cards() if name in (each, catalogued_device(each).title)}
    if found:
        return found
    sizes = [total_bytes] if total_bytes else [catalogued_device(e).memory_bytes for e in _cards()]
    devices = [
        CudaDevice(name=prefix + name, memory_bytes=num_bytes)
        for prefix in _LEFT_OUT
        for num_bytes in sizes
    ]
    return {each for each in map(catalogue_name, devices) if each is not None}


def _cards() -> list[str]:
    return [name for name in device_names() if catalogued_device(name).kind == CUDA]
