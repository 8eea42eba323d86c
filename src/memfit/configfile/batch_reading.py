"""The effective batch that configuration files say now, over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.errors import ConfigFileError, UsageError

from .batches import Batch
from .kinds import Role
from .settings_files import Place, Settings
from .tree import Scalar

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReading:
    """What the files say of the batch."""

    batch: Batch
    notes: tuple[str, ...] = ()


def read_batch(settings: Sequence[Settings], num_devices: int | None) -> BatchReading | None:
    """Read micro-batch, accumulation and devices; None where no file has a batch at all.

    Raises:
        ConfigFileError: if files contradict each other, or a value is no whole number.
        UsageError: if the number of devices is not known, or contradicts a file.
    """
    micro = _agreed(settings, Role.MICRO_BATCH)
    accumulation = _agreed(settings, Role.ACCUMULATION)
    total = _agreed(settings, Role.TOTAL)
    if micro is None and total is None:
        return None
    told = _devices(settings, num_devices)
    notes = []
    if told is None and micro and accumulation and total and not total % (micro * accumulation):
        told = total // (micro * accumulation)  # DeepSpeed holds the three to this
    if told is None:
        told = 1
        notes.append("Counted as one device; --devices N says otherwise.")
    accumulation = accumulation or _inferred(total, micro, told)
    micro = micro or _inferred(total, accumulation, told)
    batch = Batch(micro_batch_size=micro, accumulation=accumulation, num_devices=told)
    if total is not None and batch.effective_size != total:
        raise ConfigFileError(
            f"the effective batch is said to be {total}, but micro-batch x devices x accumulation "
            f"is {batch.product()}. Give the number of devices with --devices, or correct the file",
            _paths(settings),
        )
    return BatchReading(batch=batch, notes=tuple(notes))


def is_auto(place: Place) -> bool:
    """Return whether a value is left to the framework that reads the file."""
    return place.entry.value == AUTO


def whole_number(place: Place) -> int:
    """Read a whole number of at least one.

    Raises:
        ConfigFileError: if the value is none.
    """
    value = place.entry.value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    obstacle = place.document.entry_obstacle(place.key)
    is_certain = not obstacle or place.document.format != "Python"  # a name may be set twice
    if type(number) is int and number >= 1 and is_certain:
        return number
    raise ConfigFileError(
        f"{place} is {value!r}" + (f" ({obstacle})" if obstacle else "") + ", and a whole number "
        "of at least 1 is needed. Write the number, or name another key with --mapping",
        place.document.path,
    )


def _inferred(total: int | None, factor: int | None, num_devices: int) -> int:
    """Infer the missing factor as DeepSpeed does: from the effective batch, else one."""
    return max(1, total // ((factor or 1) * num_devices)) if total else 1


def _agreed(settings: Sequence[Settings], role: Role) -> int | None:
    """Read a role from all files that have it.

    Raises:
        ConfigFileError: if they contradict each other.
    """
    places = [place for each in settings if (place := each.place(role)) and not is_auto(place)]
    numbers = {whole_number(place) for place in places}
    if len(numbers) > 1:
        said = " and ".join(f"{place} is {whole_number(place)}" for place in places)
        raise ConfigFileError(f"the files contradict each other: {said}", _paths(settings))
    if numbers:
        return numbers.pop()
    defaults = (each.kind.defaults.get(role) for each in settings)
    return next((number for number in defaults if number is not None), None)


def _devices(settings: Sequence[Settings], num_devices: int | None) -> int | None:
    found = [number for each in settings for number in _devices_of(each)]
    known = {number for number in found if number is not None}
    if num_devices is not None:
        known.add(num_devices)
    if len(known) > 1:
        raise UsageError(
            f"The number of devices is {' and '.join(map(str, sorted(known)))} at once: "
            f"{_paths(settings)} and --devices say so. Make them agree."
        )
    if found and not known:
        raise UsageError(
            f"{_paths(settings)} leave the number of devices to the machine. Say how many there "
            "are with --devices N."
        )
    return known.pop() if known else None


def _devices_of(settings: Settings) -> Iterator[int | None]:
    """Yield how many devices a file says; None where it leaves that to the machine."""
    listed = settings.num_listed(Role.DEVICES)
    place = settings.place(Role.DEVICES) if listed is None else None
    nodes = settings.place(Role.NODES)
    per_node = listed if place is None else _count(place.entry.value)
    if listed is not None or place is not None:
        num_nodes = whole_number(nodes) if nodes else 1
        yield None if per_node is None else per_node * num_nodes


def _count(value: Scalar) -> int | None:
    if isinstance(value, str) and "," in value:
        return len([part for part in value.split(",") if part.strip()])
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value > 0 else None


def _paths(settings: Sequence[Settings]) -> str:
    return ", ".join(str(part.document.path) for each in settings for part in each.parts)
