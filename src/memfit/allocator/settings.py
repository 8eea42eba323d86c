"""The settings of PyTorch's CUDA caching allocator, and the text that PYTORCH_ALLOC_CONF holds.

The one choice here: a setting is stored as the allocator uses it (bytes, divisions by interval), so
that nothing is read twice. Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of
torch 2.13; how ``roundup_power2_divisions`` is read was compared with libc10 of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from memfit.errors import UsageError
from memfit.units import GIB, MIB, format_bytes

NUM_INTERVALS = 16
"""Intervals with rounding of their own: from 1 MiB, from 2 MiB, ... and from 32 GiB."""
_LARGEST_SMALL_SEGMENT_BYTES = 10 * MIB
_ENTRY = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")

# Keys that PyTorch knows and that change nothing here: pinned host memory, locks, CUDA graphs, and
# whether an out-of-memory error is thrown before or after cudaMalloc was tried.
_WITHOUT_EFFECT = frozenset({
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How PyTorch's CUDA caching allocator is set.

    Raises:
        UsageError: if a setting is outside what PyTorch accepts.
    """

    expandable_segments: bool = False
    """One growing segment per pool and stream instead of many of fixed size."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are never split; None means that all may be split."""
    large_segment_bytes: int = 20 * MIB
    """The segment that requests above 1 MiB and below 10 MiB share."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory above which old cached blocks are freed; 0 means never.
    Works only with a memory fraction below 1."""
    roundup_power2_divisions: int | Mapping[int, int] = 0
    """Divisions between two powers of two that requests are rounded up to; 0 or 1 means 512 bytes.
    A mapping gives them per interval, by the first byte count of the interval (1 MiB to 32 GiB)."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than an unsplittable request a reused block may be."""
    per_process_memory_fraction: float | None = None
    """The part of the device that this process may hold; None or 1 means all of it."""

    def __post_init__(self) -> None:
        if self.large_segment_bytes <= _LARGEST_SMALL_SEGMENT_BYTES:
            raise UsageError(_refusal("large_segment_bytes", self.large_segment_bytes, "> 10 MiB"))
        floor = f">= large_segment_bytes, {format_bytes(self.large_segment_bytes)}"
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            num_bytes = getattr(self, name)
            if num_bytes is not None and num_bytes < self.large_segment_bytes:
                raise UsageError(_refusal(name, num_bytes, floor))
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            threshold = self.garbage_collection_threshold
            raise UsageError(_refusal("garbage_collection_threshold", threshold, "in [0, 1)"))
        fraction = self.per_process_memory_fraction
        if fraction is not None and not 0.0 < fraction <= 1.0:
            raise UsageError(_refusal("per_process_memory_fraction", fraction, "in (0, 1]"))
        self.divisions()

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of PYTORCH_ALLOC_CONF, such as ``expandable_segments:True``.

        Keys that concern pinned host memory, locks or CUDA graphs are accepted and change nothing.

        Raises:
            UsageError: if a key is unknown, a value makes no sense, or the backend is another one.
        """
        found: dict[str, object] = {}
        for key, value in _entries("".join(text.split())):
            if key == "backend":
                if value != "native":
                    raise UsageError(
                        f"The allocator backend {value!r} is not modelled; needed is native. "
                        "Take backend out of PYTORCH_ALLOC_CONF."
                    )
            elif key in _READERS:
                field, reader = _READERS[key]
                found[field] = reader(key, value)
            elif key not in _WITHOUT_EFFECT:
                raise UsageError(_unknown(key))
        if "large_segment_bytes" in found:
            # The tolerance follows the segment unless it is given (AllocatorConfig.cpp, parseArgs).
            found.setdefault("max_non_split_rounding_bytes", found["large_segment_bytes"])
        return cls(**found)  # type: ignore[arg-type]  # each reader gives its field's own type

    def divisions(self) -> tuple[int, ...]:
        """Return the divisions of the sixteen intervals, from 1 MiB (and below) to 32 GiB (and up).

        Raises:
            UsageError: if a number of divisions or an interval is no power of two.
        """
        given = self.roundup_power2_divisions
        if not isinstance(given, Mapping):
            given = {MIB << index: given for index in range(NUM_INTERVALS)}
        by_interval = [0] * NUM_INTERVALS
        for first_bytes, count in given.items():
            if not _is_power_of_two(first_bytes) or not MIB <= first_bytes <= 32 * GIB:
                needed = "an interval that begins at a power of two from 1 MiB to 32 GiB"
                raise UsageError(_refusal("roundup_power2_divisions", first_bytes, needed))
            if count != 0 and not _is_power_of_two(count):
                raise UsageError(
                    _refusal("roundup_power2_divisions", count, "a power of two, or 0 for none")
                )
            by_interval[(first_bytes // MIB).bit_length() - 1] = count
        return tuple(by_interval)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _refusal(name: str, found: object, needed: str) -> str:
    return (
        f"The allocator setting {name} is {found!r}; needed is {needed}. "
        "Change it in PYTORCH_ALLOC_CONF or in AllocatorSettings."
    )


def _unknown(key: str) -> str:
    known = sorted([*_READERS, *_WITHOUT_EFFECT, "backend"])
    near = get_close_matches(key, known, n=1, cutoff=0.4)
    nearest = f"Nearest: {near[0]}. " if near else ""
    return (
        f"The allocator has no setting {key!r}. {nearest}It knows: {', '.join(sorted(_READERS))}."
    )


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield ``(key, value)`` of a text without whitespace."""
    position = 0
    while position < len(text):
        match = _ENTRY.match(text, position)
        if match is None:
            raise UsageError(
                f"PYTORCH_ALLOC_CONF cannot be read from {text[position:]!r}; needed is "
                "key:value,key:value or key:[start:value,>:value]. Correct it there."
            )
        yield match[1], match[2]
        position = match.end()


def _read_bool(key: str, value: str) -> bool:
    if value not in {"True", "False"}:
        raise UsageError(_refusal(key, value, "True or False, in this spelling"))
    return value == "True"


def _read_mib(key: str, value: str) -> int:
    return _read_int(key, value, "a whole number of MiB") * MIB


def _read_int(key: str, value: str, needed: str) -> int:
    if not value.isdecimal():
        raise UsageError(_refusal(key, value, needed))
    return int(value)


def _read_float(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(_refusal(key, value, "a number from 0 to 1")) from None


def _read_threshold(key: str, value: str) -> float:
    threshold = _read_float(key, value)
    if not 0.0 < threshold < 1.0:
        raise UsageError(_refusal(key, value, "in (0, 1); leave the key out for no collection"))
    return threshold


def _read_divisions(key: str, value: str) -> int | Mapping[int, int]:
    """Read ``4`` or ``[256:1,512:2,>:4]``.

    The first pair also holds for all smaller intervals, ``>`` for all after the last one named, and
    an interval between two named ones has none.
    """
    if not value.startswith("["):
        count = _read_int(key, value, "a power of two")
        if count == 0:
            raise UsageError(_refusal(key, value, "a power of two; leave the key out for none"))
        return count
    by_interval: dict[int, int] = {}
    last = 0
    begins = True
    for pair in value[1:-1].split(","):
        start, _, count_text = pair.partition(":")
        count = _read_int(key, count_text, "[start:divisions,...] with whole numbers")
        if start == ">":
            covered = range(last + 1, NUM_INTERVALS)
        else:
            last = _interval(key, start)
            covered = range(0 if begins else last, last + 1)
            begins = False
        by_interval.update({MIB << index: count for index in covered})
    return by_interval


def _interval(key: str, start: str) -> int:
    """Return the index of the interval that begins at a number of MiB."""
    first = _read_int(key, start, "an interval that begins at a power of two in MiB")
    if not _is_power_of_two(first):
        raise UsageError(_refusal(key, start, "an interval that begins at a power of two in MiB"))
    return min(first.bit_length() - 1, NUM_INTERVALS - 1)


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_size_bytes", _read_mib),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_float),
}
