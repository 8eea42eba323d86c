"""Finds tensors that no variable of the program leads to, and follows who refers to them."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Set
from typing import Any

import torch

from memfit.journal.records import LeakEvent
from memfit.units import format_bytes

from .contents import Attributes, LruWrapper, lineage
from .wording import remedy_of

_MOST_SCANS = 6
_MOST_LINKS = 8
_MOST_REFERRERS = 8
_LEAST_NEW = 8
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_BASES = (set, dict, list, tuple)
_NO_HOLDERS = {types.FrameType, types.CellType, type(iter([]))}
"""Frames are this module's own; the rest passes on what another holds."""


class UnheldTensors:
    """Count the tensors that are not reached, scan by scan."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._next_steps = 0.0
        self.is_growing = False

    def scan(self, seen: Set[int], growth: tuple[float, int], step: int) -> LeakEvent | None:
        """Look through all objects of the collector; a second scan tells whether they grow."""
        if len(self._counts) >= _MOST_SCANS:
            return None
        found = [_unreached(generation, seen) for generation in range(3)]
        count = sum(len(each) for each in found)
        before = self._counts[-1] if self._counts else None
        self._counts.append(count)
        self.is_growing = before is None or count >= before + _LEAST_NEW
        newest = next((each for each in found if each), [])
        if before is None or not self.is_growing or not newest:
            return None
        sample = newest[-1 - min(2, len(newest) - 1)]
        del found, newest
        chain, is_cycle = _climb(sample, seen)
        if not chain or (is_cycle and gc.isenabled() and gc.get_threshold()[0] > 0):
            return None  # nobody to name, or the collector will come to it
        return _event(chain, is_cycle=is_cycle, growth=growth, step=step)


def _unreached(generation: int, seen: Set[int]) -> list[Any]:
    """Return the tensors of a generation that looks do not reach, the newest last."""
    objects = gc.get_objects(generation=generation)
    return [each for each in objects if type(each) in _TENSORS and id(each) not in seen]


def _climb(value: Any, seen: Set[int]) -> tuple[list[str], bool]:
    """Follow referrers up to a module or back to where they came from.

    Nothing is given if they lead to what a look has reached: of long lists it reads a sample, and
    of caches with a bound nothing.
    """
    chain: list[str] = []
    passed: list[Any] = [value]
    for _ in range(_MOST_LINKS):
        holder = _referrer(passed)
        if holder is None:
            break
        if id(holder) in seen or _has_bound(holder):
            return [], False
        chain.insert(0, _link(holder, passed[-1]))
        if id(holder) in {id(each) for each in passed}:
            return chain, True
        passed.append(holder)
        if type(holder) is dict and _module_of(holder):
            break  # its functions refer to it in turn, those that the program has imported as well
    return chain, False


def _has_bound(holder: Any) -> bool:
    return type(holder) is LruWrapper and LruWrapper.cache_info(holder).maxsize is not None


def _module_of(namespace: dict[Any, Any]) -> str:
    """Name the module whose variables these are; empty if they are none's."""
    return next((n for n, m in list(sys.modules.items()) if _is_namespace(m, namespace)), "")


def _referrer(passed: list[Any]) -> Any:
    """Choose what refers to an object: rather what was passed already, which closes a cycle."""
    known = {id(each) for each in passed}
    first = None
    for each in gc.get_referrers(passed[-1])[:_MOST_REFERRERS]:
        if each is passed or type(each) in _NO_HOLDERS:
            continue
        if id(each) in known:
            return each
        if first is None:
            first = each
    return first


def _link(holder: Any, value: Any) -> str:
    """Write how a holder refers to a value."""
    kind = type(holder)
    name = str(type.__dict__["__name__"].__get__(kind))
    if kind is dict:
        module = _module_of(holder)
        key = next((key for key, each in list(holder.items()) if each is value), None)
        shown = repr(key) if type(key) in {str, int} else "..."
        return f"{module}[{shown}]" if module else f"dict[{shown}]"
    if any(base in lineage(kind) for base in _BASES):
        return f"{name}[...]"
    held = Attributes(kind).of(holder)
    attribute = next((key for key, each in held if each is value), None)
    return f"{name}.{attribute}" if type(attribute) is str else name


def _is_namespace(module: Any, namespace: dict[Any, Any]) -> bool:
    return type(module) is types.ModuleType and module.__dict__ is namespace


def _event(chain: list[str], *, is_cycle: bool, growth: tuple[float, int], step: int) -> LeakEvent:
    steps, grown = growth
    kind = "reference-cycle" if is_cycle else "library-held"
    named = [link for link in chain if not link.startswith(("dict[", "list[", "tuple["))]
    holder = named[-1] if named else "an object outside the program's variables"
    why = "and the garbage collector is off" if is_cycle else "outside the program's own modules"
    sentence = (
        f"Tensors that only {holder} refers to pile up, {why}: {format_bytes(grown)} in "
        f"{steps:.0f} steps, {format_bytes(grown / steps)} per step. {remedy_of(kind)}"
    )
    return LeakEvent(
        step=step,
        kind=kind,
        holder=holder,
        chain=tuple(chain),
        source_line="",
        growth_bytes_per_step=grown / steps,
        total_growth_bytes=grown,
        num_steps=int(steps),
        place="host",
        sentence=sentence,
    )
