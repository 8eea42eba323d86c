"""The settings of PyTorch's caching allocator: known to it, readable, and not at odds.

Source: c10/core/AllocatorConfig.cpp of torch 2.13, and trials with it: PYTORCH_CUDA_ALLOC_CONF is
read, else PYTORCH_HIP_ALLOC_CONF, else PYTORCH_ALLOC_CONF; one that is set and empty counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memfit.allocator.settings import AllocatorSettings
from memfit.errors import UsageError

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine

_NAME = "allocator settings"
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# In the order in which torch looks; the first that is set is read, even if it is empty.
_ENTRY = re.compile(r"([a-z_0-9]+):(\[[^\]]*\]|[^,\[\]]+)")
_BACKENDS = ("native", "cudaMallocAsync")


def check_allocator(machine: Machine) -> Iterator[Finding]:
    """Check the text that the allocator will read."""
    set_to = {name: machine.variables[name] for name in _NAMES if name in machine.variables}
    given = {name: "".join(text.split()) for name, text in set_to.items()}
    if not any(given.values()):
        yield not_applicable(_NAME, "none are set")
        return
    name, text = next(iter(given.items()))
    unlike = [other for other, value in given.items() if value != text]
    if unlike:
        yield Finding(
            name=_NAME,
            status=Status.WARNING,
            found=f"{name}={text} counts; {', '.join(unlike)} says otherwise and is not read",
            needed="one of them",
            remedy="Leave only the one that is meant.",
            command=f"unset {' '.join(unlike)}",
        )
    yield from _check(name, text) or [fine(_NAME, f"{name}={text}")]


def _check(name: str, text: str) -> list[Finding]:
    """Check one text; an unknown key or a wrong value ends a run at its first tensor."""
    told = f"{name}={text}"
    backends = re.findall(r"(?:^|,)backend:([^,]*)", text)
    plain = re.sub(r"(?:^|,)backend:[^,]*", "", text).strip(",")
    try:
        settings = AllocatorSettings.parse(plain)
    except UsageError as error:
        return [_problem(told, "settings that the allocator knows", str(error))]
    if backends and backends[-1] not in _BACKENDS:
        needed = f"backend:{' or backend:'.join(_BACKENDS)}"
        return [_problem(told, needed, "Correct the name of the backend, or leave it out.")]
    if "cudaMallocAsync" in backends:
        found = f"{told}: CUDA's own pool is used; what memfit predicts is for the native allocator"
        if plain:
            found += f", and {plain} has no effect"
        return [Finding(name=_NAME, status=Status.NOTE, found=found)]
    return [*_check_repeats(told, plain), *_check_pairs(told, settings)]


def _check_repeats(told: str, text: str) -> Iterator[Finding]:
    """Find a key that is given twice; the last counts."""
    values: dict[str, set[str]] = {}
    for key, value in _ENTRY.findall(text):
        values.setdefault(key, set()).add(value)
    for key, found in values.items():
        if len(found) > 1:
            yield Finding(
                name=_NAME,
                status=Status.WARNING,
                found=f"{told}: {key} is {' and '.join(sorted(found))}; the last counts",
                needed="each key once",
                remedy="Leave only the value that is meant.",
            )


def _check_pairs(told: str, settings: AllocatorSettings) -> Iterator[Finding]:
    """Find settings that do nothing beside others, or without them."""
    if settings.expandable_segments and settings.max_split_size_bytes is not None:
        found = f"{told}: max_split_size_mb is there against what expandable_segments prevents"
        yield Finding(
            name=_NAME,
            status=Status.NOTE,
            found=found,
            remedy="Leave max_split_size_mb out, unless a prediction with it is better.",
        )
    if settings.garbage_collection_threshold and settings.per_process_memory_fraction in {None, 1}:
        yield Finding(
            name=_NAME,
            status=Status.NOTE,
            found=f"{told}: garbage_collection_threshold acts only with a memory fraction below 1",
            remedy="Set per_process_memory_fraction with it, or leave it out.",
        )


def _problem(told: str, needed: str, remedy: str) -> Finding:
    return Finding(name=_NAME, status=Status.PROBLEM, found=told, needed=needed, remedy=remedy)
