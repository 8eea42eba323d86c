"""Weights that lie on the card, read ahead by threads, while the main thread quantizes others.

A recording has them one after the other: a weight is read, quantized and let go, then the next.
transformers 5.0 to 5.3 reads with a pool of ``min(4, os.cpu_count())`` threads, to which all
weights are given at once, in the order of their names; each takes its memory on the card when it
begins. The main thread waits for the first weight, the largest or nearly so: an embedding or an
output layer. Until it is there the other threads read on. From then on quantizing is faster than
reading. So what is read ahead follows the bytes of the weights: at one pace for all, three times
the first weight's. Beyond the block that was taken first, as large as the quantized model, reading
is slower, because each weight then waits for cudaMalloc. Here the recorded events are put into that
order.

Limits: that quantizing keeps up with reading fits the rows here, whose hosts have few cores.
On a host that reads faster nearly the whole checkpoint gets onto the card: pull request 44576
read 13.5 GB of reserved memory for 7 billion weights. No row here is of such a host.

Source: transformers 5.0.0, core_model_loading.py (GLOBAL_WORKERS, spawn_materialize,
convert_and_load_state_dict_in_model) and modeling_utils.py (caching_allocator_warmup, which calls
cudaMalloc "the loading speed bottleneck"); pull requests 42324 (four threads) and 44576, which
switched them off for quantized loading because of the memory they take (first released in 5.4.0).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.allocator.blocks import SMALL_BYTES
from memfit.trace.events import Trace

from . import loading, quantized
from .rows import Row

NUM_READERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """How fast weights are read, compared with those that fit into the first block."""

    first: float = 1.0
    """The first weight."""
    beyond: float = 1.0
    """What needs memory from the driver."""


LIKELY = Paces(beyond=1 / 2)
"""All alike, and half as fast beyond the first block. The half is a guess: nobody tells how much
slower. It lies between what fitcheck's two families of models with large embeddings show here,
2/3 and 1/3; 1.7 billion parameters and fewer need no more than the first block, or hardly more."""
_OTHERS = tuple(
    Paces(first=first, beyond=beyond)
    for first in (1.0, 1.2, 1.5, 2.0)
    for beyond in (1.0, 1 / 2, 1 / 4)
)
"""Small differences decide whether what was read ahead leaves room that a step can use, so there
are a dozen."""
LIKELY_OF_FILES = Paces(first=1 / 2, beyond=1 / 2)
"""Of several files the first weight's, which for an output layer is the last, may have to come from
the disk while others are in the page cache. How much slower that is, is a guess with three rows of
one model in view, which read 0, 6 and 18 % more than with equal paces."""
_COLD = (Paces(first=1 / 3), Paces(first=1 / 2))
_FILE_BYTES = 5_000_000_000
"""Checkpoints above this were written as several files (``max_shard_size`` of transformers 4)."""
_FIRST_THREADED, _FIRST_SEQUENTIAL = (5, 0), (5, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A weight that was read onto the card."""

    allocation: int
    num_bytes: int
    uses: tuple[int, ...]
    """The events of quantizing it, up to its end; none where it stays as it is."""
    freed_bytes: int = 0
    """How much less it takes once it is quantized."""


def reads_ahead(row: Row) -> bool:
    """Return whether the row's transformers read weights ahead while it quantized others."""
    if row.quantization is None or row.constructor.get("reads_ahead") is False:
        return False
    version = row.library_versions.get("transformers", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return _FIRST_THREADED <= numbers < _FIRST_SEQUENTIAL


def likely_order(history: Trace) -> Trace:
    """Return a recording with its weights read ahead as is likely."""
    return _reordered(history, LIKELY_OF_FILES if _has_several_files(history) else LIKELY)


def other_orders(history: Trace) -> Iterator[Trace]:
    """Yield the recording with its weights read ahead otherwise, as other machines may do it."""
    for paces in (*_OTHERS, *_COLD) if _has_several_files(history) else _OTHERS:
        yield _reordered(history, paces)


def _has_several_files(history: Trace) -> bool:
    return sum(read.num_bytes for read in find_reads(history)) > _FILE_BYTES


def find_reads(history: Trace) -> tuple[Read, ...]:
    """Find the weights that were read onto the card, in the order of the recording."""
    reads: list[Read] = []
    for position, event in enumerate(history.events):
        if event >= 0 and _is_from(history, event, loading, "_loaded"):
            uses = tuple(_uses(history, position))
            change = sum(_signed_bytes(history, use) for use in uses)
            num_bytes = history.allocations[event].num_bytes
            reads.append(
                Read(allocation=event, num_bytes=num_bytes, uses=uses, freed_bytes=-change)
            )
    return tuple(reads)


def _uses(history: Trace, position: int) -> Iterator[int]:
    """Yield the events of quantizing the weight that is read at a position."""
    made = {history.events[position]}
    for event in history.events[position + 1 :]:
        if event >= 0 and _is_from(history, event, quantized, "quantize", "_quantize_scales"):
            made.add(event)
        elif event >= 0 or -1 - event not in made:
            return
        yield event
        if event == -1 - history.events[position]:
            return


def _is_from(history: Trace, event: int, module: object, *functions: str) -> bool:
    """Return whether one of a module's functions asked for the memory of an allocation."""
    place, _, line = history.allocations[event].source_line.rpartition(":")
    name = str(getattr(module, "__name__", "")).replace(".", "/")
    if place != f"{name}.py":
        return False
    codes = (getattr(module, function).__code__ for function in functions)
    return any(int(line) in {number for *_, number in code.co_lines()} for code in codes)


def _signed_bytes(history: Trace, event: int) -> int:
    if event >= 0:
        return history.allocations[event].num_bytes
    return -history.allocations[-1 - event].num_bytes


def _reordered(history: Trace, paces: Paces) -> Trace:
    reads = find_reads(history)
    if not reads:
        return history
    first = history.events.index(reads[0].allocation)
    last = first + sum(1 + len(read.uses) for read in reads)
    block_bytes = max(
        (history.allocations[event].num_bytes for event in history.events[:first] if event >= 0),
        default=0,
    )
    order: list[int] = []
    for is_use, index in schedule(reads, paces, block_bytes):
        order += reads[index].uses if is_use else (reads[index].allocation,)
    return replace(history, events=[*history.events[:first], *order, *history.events[last:]])


def schedule(reads: Sequence[Read], paces: Paces, block_bytes: int) -> list[tuple[bool, int]]:
    """Say in which order weights are taken onto the card (False) and used there (True).

    Times are in bytes that a reader reads. Weights are used in their order, in no time. Small
    weights share segments, so that they wait for the driver no more often than others.
    """
    readers = [0.0] * NUM_READERS
    happenings: list[tuple[float, bool, int]] = []
    given_back: list[tuple[float, int]] = []
    used_at, held_bytes = 0.0, 0
    for index, read in enumerate(reads):
        begin = heapq.heappop(readers)
        while given_back and given_back[0][0] <= begin:
            held_bytes -= heapq.heappop(given_back)[1]
        held_bytes += read.num_bytes
        is_beyond = read.num_bytes > SMALL_BYTES and held_bytes > block_bytes
        pace = (paces.beyond if is_beyond else 1.0) * (paces.first if index == 0 else 1.0)
        end = begin + read.num_bytes / pace
        heapq.heappush(readers, end)
        used_at = max(used_at, end)
        heapq.heappush(given_back, (used_at, read.freed_bytes))
        happenings += [(begin, False, index), (used_at, True, index)]
    return [(is_use, index) for _, is_use, index in sorted(happenings)]
