"""Reads the allocator's settings from a snapshot, which has them as a text and in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.allocator.settings import AllocatorSettings
from memfit.errors import DataError, UsageError
from memfit.units import MIB

_MOST_CHARACTERS = 2000
_NO_COLLECTION = (
    "garbage_collection_threshold is recorded. It acts only where a memory fraction was set as "
    "well, which a snapshot does not say; the replay is without both."
)


def read_settings(source: str, recorded: object) -> tuple[AllocatorSettings, str, tuple[str, ...]]:
    """Return the settings, their text, and notes on what could not be taken over.

    The text is taken from the key that ends in ``ALLOC_CONF`` (PYTORCH_CUDA_ALLOC_CONF; other
    backends have names of their own). Without a text the parts are taken, and before torch 2.1
    there is neither: then the defaults are assumed, which a note says. A memory fraction is left
    out: the limit is known from the failure itself.

    Raises:
        DataError: if the parts are no settings, or the text names another backend.
    """
    if recorded is None:
        note = "The snapshot does not say the allocator's settings; the defaults are assumed."
        return AllocatorSettings(), "", (note,)
    if not isinstance(recorded, Mapping):
        raise DataError(source, f"its allocator_settings are a {type(recorded).__name__}")
    text = next(
        (value for key, value in recorded.items() if str(key).endswith("ALLOC_CONF") and value), ""
    )
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise DataError(
            source, "its allocator_settings hold something else than a text of settings"
        )
    notes: tuple[str, ...] = ()
    try:
        settings = AllocatorSettings.parse(text) if text else _of_parts_or_refused(source, recorded)
    except UsageError as error:
        if "backend" in text:
            raise DataError(source, str(error)) from None
        settings = _of_parts_or_refused(source, recorded)
        notes = (f"The recorded settings {text[:200]!r} are known in part: {error}",)
    text = text or settings_text(settings)
    if settings.garbage_collection_threshold:
        notes += (_NO_COLLECTION,)
    plain = replace(settings, per_process_memory_fraction=None, garbage_collection_threshold=0.0)
    return plain, text, notes


def _of_parts_or_refused(source: str, recorded: Mapping[str, Any]) -> AllocatorSettings:
    try:
        return _of_parts(recorded)
    except (TypeError, ValueError, AttributeError, OverflowError, UsageError) as error:
        reason = f"its allocator_settings make no sense ({str(error)[:200]})"
        raise DataError(source, reason) from None


def _of_parts(recorded: Mapping[str, Any]) -> AllocatorSettings:
    max_split_bytes = int(recorded.get("max_split_size", -1))
    divisions = dict(recorded.get("roundup_power2_divisions") or {})
    return AllocatorSettings(
        expandable_segments=bool(recorded.get("expandable_segments", False)),
        # Without a limit it is recorded as -1, or as the largest number there is.
        max_split_size_bytes=max_split_bytes if 0 < max_split_bytes < 2**62 else None,
        garbage_collection_threshold=float(recorded.get("garbage_collection_threshold") or 0.0),
        roundup_power2_divisions={
            int(start) * MIB: int(count) for start, count in divisions.items() if count
        },
    )


def settings_text(settings: AllocatorSettings) -> str:
    """Write settings as PYTORCH_ALLOC_CONF says them; empty for the defaults."""
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_size_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_size_bytes // MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    divisions = settings.roundup_power2_divisions
    if isinstance(divisions, Mapping):
        if any(divisions.values()):
            pairs = (
                f"{start // MIB}:{count}" for start, count in sorted(divisions.items()) if count
            )
            parts.append(f"roundup_power2_divisions:[{','.join(pairs)}]")
    elif divisions > 1:
        parts.append(f"roundup_power2_divisions:{divisions}")
    return ",".join(parts)
