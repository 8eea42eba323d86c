"""The list of the devices that memfit knows, series by series."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.devices.catalogue import catalogued_device, device_names
from memfit.devices.names import by_series
from memfit.devices.spec import CPU, ROCM, Device
from memfit.units import format_bytes

from .blocks import table

_TERA, _GIGA = 1e12, 1e9
_BANDWIDTH = "memory_bandwidth_bytes_per_second"


def catalogue() -> Iterator[str]:
    """List every card with its memory, how that is known, and its main rates."""
    cards = {name: catalogued_device(name) for name in device_names() if name != CPU}
    yield (
        f"{len(cards)} cards, and `{CPU}`, this machine's processor. Rates are dense, in TFLOP/s; "
        "`known` is how the memory is known, CC the compute capability."
    )
    for series, names in by_series({name: card.title for name, card in cards.items()}).items():
        yield f"### {series}"
        yield table(
            "name | card | memory | known | GB/s | float32 | bfloat16 | float16 | CC",
            "llrlrrrrr",
            (_row(cards[name]) for name in names),
        )


def _row(card: Device) -> tuple[str, ...]:
    memory = card.facts["memory_bytes"]
    return (
        f"`{card.name}`",
        card.title.removeprefix("NVIDIA ").removeprefix("AMD "),
        format_bytes(memory.value),
        memory.certainty,
        f"{card.value(_BANDWIDTH) / _GIGA:,.0f}",
        *(_rate(card, dtype) for dtype in ("float32", "bfloat16", "float16")),
        "ROCm" if card.platform == ROCM else card.compute_capability or "",
    )


def _rate(card: Device, dtype: str) -> str:
    fact = card.facts.get(f"matrix_{dtype}_flops_per_second")
    return "-" if fact is None else f"{fact.value / _TERA:.4g}"
