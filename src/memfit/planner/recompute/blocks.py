"""Finds the chain of blocks in a recorded step, and what each block could keep or recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from memfit.allocator.simulate import AllocatorRules
from memfit.cost.checkpoints import CheckpointedBlock
from memfit.planner.recompute.chain import Chain, ChainBlock, Option
from memfit.planner.recompute.forward_backward import ForwardBackward, highest_forward_backward
from memfit.planner.recompute.knapsack import Item, Trade, frontier, spread
from memfit.trace.events import ModuleCall, Operation, Phase, Trace

Seconds = Callable[[Operation], float]
Hooks = Callable[[CheckpointedBlock], float]

_LARGEST_SHARE = 1 / 6
"""A module that holds more of the saved bytes than this is looked into, where it has parts."""
_COVERED_SHARE = 0.7
"""It is split into its parts if they hold at least this much of its saved bytes."""
_SMALLEST_SHARE = 1 / 1000
_MOST_OPTIONS = 16
_ALL_BUT_ROUNDING = 0.999


def chain_of(
    trace: Trace,
    rules: AllocatorRules,
    seconds_of: Seconds,
    link_bytes_per_second: float | None = None,
    as_it_is: Trace | None = None,
    *,
    hooks_of: Hooks = lambda _block: 0.0,
) -> Chain:
    """Return the chain of blocks of a step that stores everything.

    Args:
        trace: the steady step, recorded without checkpointing.
        rules: how the allocator rounds.
        seconds_of: the time of an operator.
        link_bytes_per_second: how fast a block's inputs can be moved away and back; None if they
            cannot.
        as_it_is: the same step without any strategy. Modules that leave out what they do there
            are no blocks: a head whose logits are made in chunks after it would make them all at
            once if it were run again.
        hooks_of: the seconds of a checkpoint besides what it runs again.

    Totals are of the highest micro-batch; the seconds of recomputation are of all of them. Does not
    account for what a block's choice changes in another block, such as the order of frees; a plan
    has to be recorded to know its peak.
    """
    step = highest_forward_backward(trace, rules)
    if step is None:
        return Chain(blocks=(), elsewhere_bytes=0)
    builder = _ChainBuilder(step, seconds_of, hooks_of, link_bytes_per_second)
    return builder.chain(frozenset() if as_it_is is None else put_off(trace, as_it_is))


def put_off(trace: Trace, as_it_is: Trace) -> frozenset[str]:
    """Name the modules that leave arithmetic of a part to what comes after them, but did it before.

    What is done later inside the same module, as adapters are that wait to be added, is not left
    out of it. The first forward may be of fewer samples; the other modules show how many fewer.
    """
    before, now = _forward_flops(as_it_is), _forward_flops(trace)
    gone = [name for name, flops in before.items() if flops and not now.get(name)]
    affected = {each for name in gone for each in ("", *_lineage(name))}
    ratios = [now.get(n, 0) / flops for n, flops in before.items() if flops and n not in affected]
    share = _ALL_BUT_ROUNDING * (median(ratios) if ratios else 1.0)
    return frozenset(name for name in affected if now.get(name, 0) < share * before.get(name, 0))


def _lineage(name: str) -> Iterator[str]:
    """Yield a module's name, and those of all that it is a part of."""
    parts = name.split(".")
    yield from (".".join(parts[:number]) for number in range(1, len(parts) + 1))


def _forward_flops(trace: Trace) -> dict[str, int]:
    """Add up the floating-point operations of the first forward of every module."""
    found: dict[str, int] = {}
    for call in trace.calls:
        if call.phase is Phase.FORWARD and call.module not in found:
            operations = trace.operations[call.first_operation : call.last_operation]
            found[call.module] = sum(operation.num_flops for operation in operations)
    return found


@dataclass(slots=True)
class _Part:
    """A module that could be a block: its forward and what it saves."""

    name: str
    call: ModuleCall
    inner: list[int]
    """Saved allocations made inside and read by nobody outside."""
    inner_bytes: int
    parts: list[_Part] = field(default_factory=list)


@dataclass(slots=True)
class _Window:
    """Where a block lies among the events of the step, in forward and in backward."""

    part: _Part
    forward: tuple[int, int]
    backward: tuple[int, int]


class _ChainBuilder:
    """Looks for the blocks of one forward and backward."""

    def __init__(
        self,
        step: ForwardBackward,
        seconds_of: Seconds,
        hooks_of: Hooks,
        link_bytes_per_second: float | None,
    ) -> None:
        self._step = step
        self._seconds_of = seconds_of
        self._hooks_of = hooks_of
        self._link = link_bytes_per_second
        self._repeats = step.repeats(seconds_of)
        self._first_read = step.first_reads()
        self._last_read = step.last_reads()
        self._read_in_backward = step.reads_in_backward()
        self._changed = step.changed()
        self._known: dict[tuple[Item, ...], list[Trade]] = {}

    def chain(self, left_out: frozenset[str]) -> Chain:
        """Build the chain of all modules but some."""
        windows = self._windows(self._parts(left_out))
        saved = 0
        blocks = []
        befores, laters = [None, *windows], [*windows[1:], None]
        for before, window, later in zip(befores, windows, laters, strict=False):
            blocks.append(self._block(before, window, later, saved))
            saved += window.part.inner_bytes
        return Chain(blocks=tuple(blocks), elsewhere_bytes=self._elsewhere(windows))

    def _parts(self, left_out: frozenset[str]) -> list[_Part]:
        """Choose the modules that are the blocks, in the order of forward."""
        called = [call for call in self._step.forward_calls() if call.module]
        counts = Counter(call.module for call in called)
        roots: list[_Part] = []
        open_parts: list[_Part] = []
        for call in called:
            if counts[call.module] > 1 or call.module in left_out:
                continue
            # What nobody outside reads in forward.
            step = self._step
            inner = [
                index
                for operation in step.operations(call)
                for index in operation.writes
                if step.is_saved(index) and self._last_read.get(index, 0) < call.last_operation
            ]
            part = _Part(call.module, call, inner, self._step.num_bytes(inner))
            while open_parts and open_parts[-1].call.last_operation <= call.first_operation:
                open_parts.pop()
            (open_parts[-1].parts if open_parts else roots).append(part)
            open_parts.append(part)
        total = sum(part.inner_bytes for part in roots)
        return [block for part in roots for block in _split(part, total)]

    def _windows(self, parts: Sequence[_Part]) -> list[_Window]:
        """Find each block's events, last block first, so that backward windows do not overlap."""
        windows: list[_Window] = []
        begin = self._step.backward_begin
        for part in reversed(parts):
            backward = self._step.backward_of(part.name, part.inner, begin)
            begin = backward[1]
            windows.append(_Window(part, self._step.forward_of(part.call), backward))
        return windows[::-1]

    def _block(
        self, before: _Window | None, window: _Window, later: _Window | None, saved_before: int
    ) -> ChainBlock:
        step, part = self._step, window.part
        saved = saved_before + part.inner_bytes
        inside = step.highest(*window.forward) - step.total(window.forward[0])
        if later is None:
            gap = step.highest(window.forward[1], window.backward[0])
        else:
            gap = max(
                step.highest(window.forward[1], later.forward[0]),
                step.highest(later.backward[1], window.backward[0]),
            )
        return ChainBlock(
            name=part.name,
            options=self._options(before, window),
            forward_bytes=step.highest(*window.forward) - saved_before,
            backward_bytes=step.highest(*window.backward) - saved_before,
            recompute_bytes=step.total(window.backward[0]) - saved + inside,
            gap_bytes=gap - saved,
        )

    def _options(self, before: _Window | None, window: _Window) -> tuple[Option, ...]:
        """Return storing everything, then recomputation with less and less kept."""
        part = window.part
        store = Option(
            recomputes=False, keep=(), saved_bytes=part.inner_bytes, unneeded_bytes=0, seconds=0.0
        )
        # What the block reads from outside and nobody else keeps for backward.
        step = self._step
        made = {index for op in step.operations(part.call) for index in op.writes}
        read = {index for op in step.operations(part.call) for index in op.reads} - made
        input_bytes = step.num_bytes(
            index for index in read if step.is_made_in_forward(index) and not step.is_saved(index)
        )
        trades = self._frontier(tuple(self._items(part)))
        useful = [trade for trade in trades if input_bytes + trade.num_bytes < part.inner_bytes]
        again = [
            Option(
                recomputes=True,
                keep=trade.keep,
                saved_bytes=input_bytes + trade.num_bytes,
                unneeded_bytes=input_bytes + trade.unneeded_bytes,
                seconds=(trade.seconds + self._hooks_seconds(part.call, trade)) * self._repeats,
            )
            for trade in reversed(spread(useful, _MOST_OPTIONS))
        ]
        return (store, *again, *self._offloading(before, window, again[-1:]))

    def _hooks_seconds(self, call: ModuleCall, trade: Trade) -> float:
        operations = self._step.operations(call)
        block = CheckpointedBlock(
            num_operators=len(operations),
            forward_seconds=sum(map(self._seconds_of, operations)),
            again_seconds=trade.seconds,
            chooses=bool(trade.keep),
        )
        return self._hooks_of(block)

    def _offloading(
        self, before: _Window | None, window: _Window, whole: Sequence[Option]
    ) -> list[Option]:
        """Return recomputation of everything from inputs that have been moved away meanwhile.

        Both ways run beside the block next to it, which computes for about as long. Inputs stay
        where backward of the block that made them needs them, as that of ``relu`` needs its result,
        unless that block is computed again.
        """
        step, call = self._step, window.part.call
        inputs = self._own_inputs(call)
        num_bytes = step.num_bytes(inputs)
        if self._link is None or not num_bytes:
            return []
        reads = [place for index in inputs for place in self._read_in_backward.get(index, ())]
        further = [place for place in reads if place >= window.backward[1]]
        if further and (before is None or max(further) >= before.backward[1]):
            return []
        seconds = sum(self._seconds_of(operation) for operation in step.operations(call))
        waited = 2 * max(0.0, num_bytes / self._link - seconds) * self._repeats
        return [
            replace(
                option,
                moved_bytes=num_bytes,
                follows_recomputed=bool(further),
                saved_bytes=option.saved_bytes - num_bytes,
                unneeded_bytes=option.unneeded_bytes + num_bytes,
                seconds=option.seconds + waited,
            )
            for option in whole
        ]

    def _own_inputs(self, call: ModuleCall) -> list[int]:
        """Return the saved allocations that a block takes from before it and nobody else reads."""
        step = self._step
        operations = range(call.first_operation, call.last_operation)
        read = {index for op in step.operations(call) for index in op.reads}
        return [
            index
            for index in read
            if step.is_saved(index)
            and self._first_read[index] in operations
            and self._last_read[index] in operations
            and not step.is_made_by(index, call)
        ]

    def _frontier(self, items: tuple[Item, ...]) -> list[Trade]:
        """Find the trades of a block, once for all blocks that are alike."""
        if items not in self._known:
            self._known[items] = frontier(items)
        return self._known[items]

    def _items(self, part: _Part) -> list[Item]:
        """List the operators that recomputation runs: up to the last one that makes a saved result.

        Recomputation stops as soon as all that was saved is there again.
        """
        inner = set(part.inner)
        counts: Counter[str] = Counter()
        operations = list(self._step.operations(part.call))
        last = max(
            (place for place, op in enumerate(operations) if inner.intersection(op.writes)),
            default=-1,
        )
        items = []
        for operation in operations[: last + 1]:
            call = f"{operation.name}.{counts[operation.name]}"
            counts[operation.name] += 1
            writes = [index for index in operation.writes if not self._step.is_scratch(index)]
            can_be_kept = (
                writes
                and not operation.is_random  # the random state would lag behind in recomputation
                and not operation.changes
                and not self._changed.intersection(writes)
            )
            unneeded = [index for index in writes if index not in inner]
            items.append(
                Item(
                    name=call,
                    num_bytes=self._step.num_bytes(writes) if can_be_kept else None,
                    unneeded_bytes=self._step.num_bytes(unneeded),
                    seconds=self._seconds_of(operation),
                )
            )
        return items

    def _elsewhere(self, windows: Sequence[_Window]) -> int:
        """Return the highest total outside of everything from the first forward to its backward."""
        if not windows:
            return self._step.peak_bytes
        first = windows[0]
        return self._step.highest_outside(first.forward[0], first.backward[1])


def _split(part: _Part, total_bytes: int) -> list[_Part]:
    """Return the blocks below a module: itself, or its parts where it holds much."""
    if part.inner_bytes < _SMALLEST_SHARE * total_bytes:
        return []
    covered = sum(inner.inner_bytes for inner in part.parts)
    is_large = part.inner_bytes > _LARGEST_SHARE * total_bytes
    if is_large and covered >= _COVERED_SHARE * part.inner_bytes:
        return [block for inner in part.parts for block in _split(inner, total_bytes)]
    return [part]
