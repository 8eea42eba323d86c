"""Weights that lie on the card, read ahead by threads, while the main thread quantizes others.

A recording has them one after the other: a weight is read, quantized and let go, then the next.
transformers 5.0 to 5.3 reads with a pool of ``min(4, os.cpu_count())`` threads, to which all
weights are given at once, in the order of their names; each takes its memory on the card when it
begins. The main thread waits for the first weight, the largest or nearly so: an embedding or an
output layer. Until it is there the other threads read on. From then on quantizing is faster than
reading. So what is read ahead follows the bytes of the weights, and how fast the first is read
beside the others. Here the recorded events are put into such orders.

How fast a weight is read depends on malloc. Checkpoints are in bf16, these models in fp16, so each
weight is converted on the host first, into memory that is given back once it is on the card. Below
32 MiB glibc hands out the same memory again; from 32 MiB on, where its threshold ends, it maps new
memory for each weight, every page of which must be faulted in. Then the weights are copied onto the
card, one after the other, because all threads use one stream. No two weights take the same time per
byte, and small differences decide whether what was read ahead leaves room that a step can use. So
orders are drawn; the likely order is the one in the middle of what they reserve.

Limits: that quantizing keeps up with reading fits the rows here, whose hosts have few cores.
On a host that reads faster nearly the whole checkpoint gets onto the card: pull request 44576
read 13.5 GB of reserved memory for 7 billion weights. No row here is of such a host.

Source: transformers 5.0.0, core_model_loading.py (GLOBAL_WORKERS, spawn_materialize,
_materialize_copy, convert_and_load_state_dict_in_model) and modeling_utils.py
(caching_allocator_warmup: "cudaMalloc is not a bottleneck at all anymore", copying and changing the
dtype is); pull requests 42324 (four threads) and 44576, which switched them off for quantized
loading because of the memory they take (first released in 5.4.0). mallopt(3), M_MMAP_THRESHOLD:
grows with what is freed, up to 4 * 1024 * 1024 * sizeof(long).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.trace.events import Trace

from . import loading, quantized
from .rows import Row

NUM_READERS = 4
MAPPED_BYTES = 4 * 1024 * 1024 * 8
"""From here on malloc maps new memory each time: glibc's DEFAULT_MMAP_THRESHOLD_MAX, 64 bits."""


MAPPED_PACE = 2 / 3
"""The pace of such a weight beside one whose host memory is used again."""
MAPPED_SPREAD, REUSED_SPREAD = 0.2, 0.5
"""Standard deviations of the logarithm of the time per byte, from weight to weight. Pace and spread
are guesses from a processor with two cores, without a card, reading such checkpoints with four
threads (2026-11-23): 0.62 to 0.70, and 0.08 to 0.24 against 0.49 to 0.53. When other programs kept
it busier the difference was smaller, a pace of 0.95."""
NUM_DRAWS = 15
_COPIED_FIRST = 1.0, 1.4
"""Without a card the first weight is read about as fast as those that use their memory again. While
it is copied onto the card the others stand still, for how long is not known: nothing to two fifths
of the time of its conversion are drawn."""
_COLD = 1 / 3, 1 / 4, 1 / 2
"""Of several files the first weight's, which for an output layer is the last, may have to come from
the disk while others are in the page cache. How much slower that is, is a guess with three rows of
one model in view, which read 0, 6 and 18 % more than without; these are taken in turn."""
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


def reads_ahead(row: Row) -> bool:
    """Return whether the row's transformers read weights ahead while it quantized others."""
    if row.quantization is None or row.constructor.get("reads_ahead") is False:
        return False
    version = row.library_versions.get("transformers", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return _FIRST_THREADED <= numbers < _FIRST_SEQUENTIAL


def drawn_orders(history: Trace) -> Iterator[Trace]:
    """Yield a recording with its weights read ahead as may be, the same draws each time."""
    reads = find_reads(history)
    if not reads:
        yield history
        return
    has_several_files = sum(read.num_bytes for read in reads) > _FILE_BYTES
    for draw in range(NUM_DRAWS):
        generator = random.Random(draw)
        pace = generator.uniform(*_COPIED_FIRST)
        pace *= _COLD[draw % len(_COLD)] if has_several_files else 1.0
        yield _reordered(history, reads, schedule(reads, drawn_seconds(reads, pace, generator)))


def find_reads(history: Trace) -> tuple[Read, ...]:
    """Find the weights that were read onto the card, in the order of the recording."""
    reads: list[Read] = []
    for position, event in enumerate(history.events):
        if event >= 0 and _is_from(history, event, loading, "_loaded"):
            num_bytes = history.allocations[event].num_bytes
            uses = tuple(_uses(history, position))
            reads.append(Read(allocation=event, num_bytes=num_bytes, uses=uses))
    return tuple(reads)


def _uses(history: Trace, position: int) -> Iterator[int]:
    """Yield the events of quantizing the weight that is read at a position."""
    made = {history.events[position]}
    for event in history.events[position + 1 :]:
        # A packed weight is attributed to the layer that holds it, not to where it is packed.
        if event >= 0 and _is_from(history, event, quantized):
            made.add(event)
        elif event >= 0 or -1 - event not in made:
            return
        yield event
        if event == -1 - history.events[position]:
            return


def _is_from(history: Trace, event: int, module: object, *functions: str) -> bool:
    """Return whether an allocation is one of some functions of a module's, or of any."""
    place, _, line = history.allocations[event].source_line.rpartition(":")
    name = str(getattr(module, "__name__", "")).replace(".", "/")
    if place != f"{name}.py":
        return False
    if not functions:
        return True
    codes = (getattr(module, function).__code__ for function in functions)
    return any(int(line) in {number for *_, number in code.co_lines()} for code in codes)


def _reordered(
    history: Trace, reads: Sequence[Read], happenings: Sequence[tuple[bool, int]]
) -> Trace:
    first = history.events.index(reads[0].allocation)
    last = first + sum(1 + len(read.uses) for read in reads)
    order: list[int] = []
    for is_use, index in happenings:
        order += reads[index].uses if is_use else (reads[index].allocation,)
    return replace(history, events=[*history.events[:first], *order, *history.events[last:]])


def drawn_seconds(
    reads: Sequence[Read], first_pace: float, generator: random.Random
) -> list[float]:
    """Draw how long each weight is read; a second is what a byte takes on average at pace 1."""
    seconds = []
    for index, read in enumerate(reads):
        is_mapped = read.num_bytes >= MAPPED_BYTES
        spread = MAPPED_SPREAD if is_mapped else REUSED_SPREAD
        pace = MAPPED_PACE if is_mapped else 1.0
        if index == 0:
            pace, spread = first_pace, 0.0  # its own spread is in the range of its pace
        seconds.append(read.num_bytes / pace * generator.lognormvariate(-(spread**2) / 2, spread))
    return seconds


def schedule(reads: Sequence[Read], seconds: Sequence[float]) -> list[tuple[bool, int]]:
    """Say in which order weights are taken onto the card (False) and used there (True).

    Weights are used in their order, in no time.
    """
    readers = [0.0] * NUM_READERS
    happenings: list[tuple[float, bool, int]] = []
    used_at = 0.0
    for index in range(len(reads)):
        begin = heapq.heappop(readers)
        end = begin + seconds[index]
        heapq.heappush(readers, end)
        used_at = max(used_at, end)
        happenings += [(begin, False, index), (used_at, True, index)]
    return [(is_use, index) for _, is_use, index in sorted(happenings)]
