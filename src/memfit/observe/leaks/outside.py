"""Watches what no variable leads to: garbage in cycles, other processes, memory outside Python."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Mapping, Set
from typing import Any

import torch

from memfit.journal.records import LeakEvent
from memfit.observe.leaks.examination import batches_given
from memfit.observe.processes import children, resident_bytes
from memfit.units import MIB, format_bytes

from .contents import Attributes, LruWrapper, lineage
from .examination import OPTIMIZER_STREAM, Examination
from .limits import LeakLimits
from .signals import MemoryInUse, Trend
from .streams import Stream
from .walk import Look
from .wording import remedy_of

_NUM_RECENT = 4
_WORKER_GROWTH = 1.08
"""Child processes are read again after so many more steps."""
_LEAST_PASSES = 4
"""Over which workers have to grow: caches fill in the first."""
_MOST_CHILDREN = 64
_LEAST_WORKER_STEPS = 60
_LEAST_WORKER_BYTES = 16 * MIB
_LEAST_UNHELD_STEPS = 24
_UNEXPLAINED_FRACTION = 0.5
_MOST_SCANS = 6
_MOST_LINKS = 8
_MOST_REFERRERS = 8
_LEAST_NEW = 8
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_BASES = (set, dict, list, tuple)
_NO_HOLDERS = {types.FrameType, types.CellType, type(iter([]))}
"""Frames are this module's own; the rest passes on what another holds."""


class OutsideWatch:
    """Follow memory, and tell growth that looks do not account for."""

    def __init__(self, limits: LeakLimits, memory_bytes: Mapping[str, int]) -> None:
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._recent: dict[str, list[MemoryInUse]] = {}
        self._in_use: dict[str, Trend] = {}
        self._devices: dict[str, Trend] = {}
        self._workers: dict[int, Trend] = {}
        self._next_workers = 0
        self._unheld = UnheldTensors()
        self._told: set[str] = set()

    def add(self, stream: Stream, in_use: MemoryInUse, index: int) -> None:
        """Add a probe."""
        recent = self._recent.setdefault(stream.name, [])
        recent.append(in_use)
        del recent[:-_NUM_RECENT]
        self._in_use.setdefault(stream.name, Trend()).add(stream.count, in_use.host_bytes)
        self._devices.setdefault(stream.name, Trend()).add(stream.count, in_use.device_bytes)
        if index >= self._next_workers:
            self._next_workers = int(index * _WORKER_GROWTH) + 1
            self._add_workers(index)

    def least_recent(self, stream: Stream, in_use: MemoryInUse) -> MemoryInUse:
        """Return the least in use at the last few boundaries of a stream."""
        recent = [*self._recent.get(stream.name, ()), in_use]
        return MemoryInUse(
            host_bytes=min(each.host_bytes for each in recent),
            device_bytes=min(each.device_bytes for each in recent),
        )

    def check(
        self, current: Stream, examination: Examination, look: Look, step: int
    ) -> list[LeakEvent]:
        """Tell what has grown besides what the looks saw."""
        found = self._worker_events(examination, step)
        if current.name != OPTIMIZER_STREAM and OPTIMIZER_STREAM in examination.streams:
            return found
        trends = {"host": self._in_use.get(current.name), "device": self._devices.get(current.name)}
        for place, trend in trends.items():
            growth = trend.steady_growth(_LEAST_UNHELD_STEPS) if trend is not None else None
            if growth is None or "native" in self._told:
                continue
            steps, grown = growth
            seen = examination.growth_in_looks(current.name, current.count - int(steps))
            if grown < self._limits.least_total_bytes or seen > _UNEXPLAINED_FRACTION * grown:
                continue
            found += self._unexplained(place, growth, look, step)
            if not found:
                current.look_soon()  # a second scan tells more than the first
        return found

    def last_findings(self, examination: Examination, step: int) -> list[LeakEvent]:
        """Tell what the processes of workers have grown by, at the end."""
        return self._worker_events(examination, step)

    def _unexplained(
        self, place: str, growth: tuple[float, int], look: Look, step: int
    ) -> list[LeakEvent]:
        steps, grown = growth
        event = self._unheld.scan(look.seen, growth, step)
        if event is not None:
            self._told.add("native")
            return [event]
        is_long = steps >= self._limits.native_steps and grown >= self._limits.least_native_bytes
        if self._unheld.is_growing or not is_long:
            return []
        self._told.add("native")
        rate = grown / steps
        sentence = (
            f"Memory in use on the {place} grows steadily by {format_bytes(rate)} per step, "
            f"{format_bytes(grown)} in {steps:.0f} steps, and nothing that Python's variables lead "
            f"to does: it is probably held outside Python. {remedy_of('native')}"
        )
        return [
            LeakEvent(
                step=step,
                kind="native",
                holder="memory outside Python",
                chain=(),
                source_line="",
                growth_bytes_per_step=rate,
                total_growth_bytes=grown,
                num_steps=int(steps),
                place=place if place == "host" else "cuda",
                sentence=sentence,
            )
        ]

    def _add_workers(self, index: int) -> None:
        now = children(os.getpid())[:_MOST_CHILDREN]
        for gone in self._workers.keys() - set(now):
            del self._workers[gone]
        for process in now:
            self._workers.setdefault(process, Trend()).add(
                index, resident_bytes(process, without_shared=True)
            )

    def _worker_events(self, examination: Examination, step: int) -> list[LeakEvent]:
        """Tell worker processes that grow, if a data loader has made them."""
        loader = examination.loader
        if loader is None or "worker-memory" in self._told:
            return []
        growths = [trend.steady_growth(_LEAST_WORKER_STEPS) for trend in self._workers.values()]
        grown = [growth for growth in growths if growth is not None]
        total = sum(num_bytes for _, num_bytes in grown)
        if not grown or total < _LEAST_WORKER_BYTES:
            return []
        steps = max(steps for steps, _ in grown)
        given = batches_given()
        needed = _LEAST_PASSES * max(given, default=0) * len(examination.streams)
        if steps < max(needed, self._limits.cache_steps):
            return []
        steps /= max(1, len(examination.streams))  # streams of one run take turns
        rate = total / steps
        if rate * self._limits.horizon_steps < (
            self._limits.horizon_fraction * self._memory_bytes.get("host", 0)
        ):
            return []
        self._told.add("worker-memory")
        dataset = examination.dataset_name
        holder = f"{loader.holder()}.dataset"
        sentence = (
            f"{len(grown)} worker processes of {loader.holder()} grow together by "
            f"{format_bytes(rate)} per step, {format_bytes(total)} in {steps:.0f} steps; they run "
            f"{dataset or 'its dataset'}. {remedy_of('worker-memory')}"
        )
        return [
            LeakEvent(
                step=step,
                kind="worker-memory",
                holder=holder,
                chain=(*loader.chain(), ".dataset", dataset),
                source_line="",
                growth_bytes_per_step=rate,
                total_growth_bytes=total,
                num_steps=int(steps),
                place="host",
                sentence=sentence,
            )
        ]


class UnheldTensors:
    """Count the tensors that are not reached, scan by scan."""

    def __init__(self) -> None:
        self._counts: list[int] = []
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
