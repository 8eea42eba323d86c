"""Asks about one device after the other; what was found stays where one fails or all is ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from memfit.errors import MemfitError

if TYPE_CHECKING:
    from memfit.devices.spec import Device

Found = TypeVar("Found")


@dataclass(slots=True)
class FoundAnswers(Generic[Found]):
    """What was found of each device that was asked about."""

    answers: list[Found] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """By the name of the device: why there is no answer."""
    num_left_out: int = 0
    """Devices that nobody came to, as the user has ended it."""

    def failures_to_json(self) -> list[dict[str, Any]]:
        """Return what stands in the place of answers."""
        return [{"device": name, "error": reason} for name, reason in self.failures.items()]


def for_each_device(
    devices: Sequence[Device],
    answer: Callable[[Device, Callable[[str], object]], Found],
    show: Callable[[str], object],
    *,
    passes_on: tuple[type[MemfitError], ...] = (),
) -> FoundAnswers[Found]:
    """Find the answer for each device; those of one kind come after each other.

    Of several devices one may fail, such as an old one that has no bf16. With Ctrl-C what has been
    found stays.

    Args:
        devices: that are asked about.
        answer: finds it for one of them, given where to tell what it is doing.
        show: tells the user.
        passes_on: errors that say something of the step and not of the device.

    Raises:
        MemfitError: if there is no answer at all, or two devices fail first, for one reason.
        KeyboardInterrupt: if nothing was found before.
    """
    found: FoundAnswers[Found] = FoundAnswers()
    ordered = sorted(devices, key=_generation)
    for number, device in enumerate(ordered):
        of_all = f" ({number + 1} of {len(devices)})" if len(devices) > 1 else ""

        def tell(doing: str, of_all: str = of_all) -> None:
            show(f"{doing}{of_all}")

        tell(f"recording the step on {device.name}")
        try:
            found.answers.append(answer(device, tell))
        except MemfitError as error:
            is_again = str(error) in found.failures.values() or number + 1 == len(devices)
            if isinstance(error, passes_on) or (is_again and not found.answers):
                raise
            found.failures[device.name] = str(error)
        except KeyboardInterrupt:
            if not found.answers:
                raise
            found.num_left_out = len(devices) - number
            break
    return found


def _generation(device: Device) -> tuple[str, tuple[int, ...]]:
    """Order devices so that those with the same recording are neighbours."""
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return device.platform, (int(major), int(minor))
