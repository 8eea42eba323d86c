"""The card itself: there, with a driver, and seen by torch.

Source: of the PCI IDs (pci-ids.ucw.cz) the vendor 0x10de is NVIDIA, and the class 0x03 a display
controller. Linux shows both under /sys/bus/pci/devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, numbers, read_text
from .torch_build import oldest_driver

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_NAME = "card"


def check_card(machine: Machine) -> Iterator[Finding]:
    """Check that an NVIDIA card that is built in can be reached, and that torch sees it."""
    driver = machine.driver_version
    yield _without_driver(machine) if driver is None else _with_driver(machine, driver)


def _with_driver(machine: Machine, driver: str) -> Finding:
    """Check that torch sees the card; its build and the driver are looked at by other checks."""
    torch = machine.torch
    if torch is None or not torch.cuda or machine.probe.host.torch_version is None:
        return not_applicable(_NAME, "no torch for CUDA that can be imported")
    oldest = oldest_driver(torch)
    if oldest is not None and numbers(driver) < numbers(oldest):
        return not_applicable(_NAME, "the driver is too old for torch")
    is_hidden = machine.variables.get("CUDA_VISIBLE_DEVICES") in {"", "-1", "NoDevFiles"}
    if machine.probe.host.cuda_devices or is_hidden:
        return fine(_NAME, f"driver {driver}")
    return Finding(
        name=_NAME,
        status=Status.WARNING,
        found=f"driver {driver} and a torch for CUDA {torch.cuda}, which sees no card: "
        "torch.cuda.is_available() is False",
        needed="a card that torch sees, or training runs on the CPU",
        remedy="nvidia-smi has to list a card and name no error; after an update of the driver "
        "restart the machine, and in a container pass the card on (--gpus all).",
        command="nvidia-smi",
    )


def _without_driver(machine: Machine) -> Finding:
    """Tell a machine without a card from one whose card nobody can reach."""
    cards = [
        device.name
        for device in sorted(machine.at("/sys/bus/pci/devices").glob("*"))
        if read_text(device / "vendor").strip() == _NVIDIA
        and read_text(device / "class").startswith(_DISPLAY)
    ]
    if not cards:
        return not_applicable(_NAME, "no NVIDIA card is built in")
    return Finding(
        name=_NAME,
        status=Status.WARNING,
        found=f"an NVIDIA card at {cards[0]}, and no device of its driver under /dev",
        needed="the driver, or training runs on the CPU",
        remedy="Install NVIDIA's driver and restart; in a container pass the card on (--gpus all). "
        "Then nvidia-smi lists it.",
        command="nvidia-smi",
    )
