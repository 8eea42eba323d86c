"""Reads a script's training data to its end, and hands the largest batches to the script's loop."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.script.scanned_data import (
    NO_FETCH,
    NO_LOADER,
    UNREADABLE,
    RecordedBatch,
    ScannedData,
)
from memfit.session.batch_shapes import (
    BatchShape,
    Kept,
    LargestBatches,
    batch_tensors,
)
from memfit.virtual.known_values import value_of

_MOST_HANDED = 10
"""Batches whose own step is recorded: six shapes fix a square in two lengths, the others check."""
_MOST_LARGEST = 4
_MOST_STEPS_WITHOUT_DATA = 8
_MOST_DROPPED = 5
"""Steps' worth of batches that a loop may fetch and drop between two steps."""
_TELL_EVERY_SECONDS = 0.5

Fetch = Callable[[Any], Any]
Copy = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Epoch:
    """The batches of one iterator: distinct shapes, their order, and the batches that are kept."""

    places: dict[BatchShape, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    seen: LargestBatches = field(default_factory=LargestBatches)

    def look(self, batch: Any, copied: Callable[[Any], Any] | None = None) -> None:
        shape = self.seen.look(len(self.order), batch, copied)
        self.order.append(self.places.setdefault(shape, len(self.places)))


class DataScan:
    """Scan the training loader of a script once its steps are recorded, and choose batches.

    The loader's iterator is read to its end: sampler, samples and collator do their real work, but
    nothing is recorded and no step is made. Batches are dropped, but for those that are the largest
    in some way and one of each size, which the loop then gets as its next ones.

    Limits: where a loop reads several data sets in turn, the one read last before the first update
    is scanned. An ``IterableDataset`` that shares its samples among workers gives one worker's.

    Args:
        most_seconds: after which the scan ends with what there is.
        elsewhere: entered around what is not recorded.
        as_recorded: makes of a tensor that was really read what the recorded script may see.
        tell: told of progress, in words.
    """

    def __init__(
        self,
        most_seconds: float,
        elsewhere: Callable[[], AbstractContextManager[None]],
        as_recorded: Copy,
        tell: Callable[[str], object],
    ) -> None:
        self._most_seconds = most_seconds
        self._elsewhere = elsewhere
        self._as_recorded = as_recorded
        self._tell = tell
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._epoch = _Epoch()
        self._source = 0
        self._queue: list[Kept] | None = None
        self._handed: list[tuple[Kept, int]] = []
        self._num_fetched: Counter[int] = Counter()
        self._fetched_at: list[Counter[int]] = []
        self._inputs: list[set[tuple[int, ...]]] = [set()]
        self._idle_steps = 0
        self._num_steps_before = 0
        self._is_complete = False
        self._reason = ""
        self.scan_seconds = 0.0
        self.is_finished = False

    def saw(self, inputs: object) -> None:
        """Hear what a module is called with in training."""
        if isinstance(inputs, tuple):
            self._inputs[-1].update(
                tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor)
            )

    def updated(self, *, is_enough: bool, has_loader: bool) -> None:
        """Hear that a step was recorded.

        Args:
            is_enough: whether as many were recorded as were asked for.
            has_loader: whether training data came from a loader.
        """
        self._fetched_at.append(self._num_fetched.copy())
        self._inputs.append(set())
        self._idle_steps += 1
        if not is_enough or self.is_finished:
            return
        if not has_loader:
            self.is_finished, self._reason = True, NO_LOADER
        elif self._idle_steps > _MOST_STEPS_WITHOUT_DATA:
            self.is_finished, self._reason = True, NO_FETCH

    def fetched(self, iterator: Any, batch: Any) -> None:
        """Hear of a batch of training data that the loop got."""
        self._num_fetched[id(iterator._dataset)] += 1
        self._idle_steps = 0
        with self._elsewhere():
            # To hold on to what the script itself has got would change what it frees.
            self._epochs.setdefault(iterator, _Epoch()).look(batch, _of_its_own)

    def instead(self, iterator: Any, fetch: Fetch) -> tuple[Any] | None:
        """Return a batch in the place of the next one, or None when there are no more to hand on.

        Args:
            iterator: of the training loader.
            fetch: gives its next batch.
        """
        if self.is_finished:
            return None
        if self._queue is None:
            self._num_steps_before = len(self._fetched_at)
            self._source = id(iterator._dataset)
            self._epoch = self._epochs.setdefault(iterator, _Epoch())
            self._scan(iterator, fetch)
            self._queue = self._chosen() if len(self._epoch.places) > 1 else []
        if not self._queue:
            self.is_finished = True
            return None
        kept = self._queue.pop(0)
        self._handed.append((kept, self._num_fetched[self._source]))
        self._num_fetched[self._source] += 1
        self._idle_steps = 0
        # Made anew, as the loader would have made it for the recorded script.
        replaced = {id(tensor): self._as_recorded(tensor) for tensor in batch_tensors(kept.batch)}
        return (copy.deepcopy(kept.batch, dict(replaced)),)

    def found(self) -> ScannedData:
        """Put together what was scanned, and which recorded steps belong to which batches."""
        recorded = self._recorded()
        largest = self._epoch.seen.largest
        chosen = {kept.position for kept, _ in self._handed}
        chosen |= {kept.position for kept in self._queue or ()}
        return ScannedData(
            shapes=list(self._epoch.places),
            order=self._epoch.order,
            is_complete=self._is_complete,
            scan_seconds=self.scan_seconds,
            recorded=recorded,
            num_steps_before=self._num_steps_before,
            largest=largest.position if largest is not None else 0,
            num_not_recorded=len(chosen) - len(recorded),
            reason=self._reason,
        )

    def _scan(self, iterator: Any, fetch: Fetch) -> None:
        """Read what is left of an epoch."""
        began = told = time.perf_counter()
        with self._elsewhere(), _disable_current_modes():
            while True:
                now = time.perf_counter()
                if now - began > self._most_seconds:
                    break
                if now - told > _TELL_EVERY_SECONDS:
                    told = now
                    self._tell(f"reading its data: {len(self._epoch.order):,} batches")
                try:
                    batch = fetch(iterator)
                except StopIteration:
                    self._is_complete = True
                    break
                except Exception as error:  # noqa: BLE001  what user code may raise has no end
                    first_line = str(error).partition("\n")[0]
                    self._reason = f"{UNREADABLE}: {type(error).__name__}: {first_line}"
                    break
                self._epoch.look(batch)
        self.scan_seconds = time.perf_counter() - began
        self._tell("recording the steps of its largest batches")

    def _chosen(self) -> list[Kept]:
        """Choose batches of different shapes, each as often as a step reads one."""
        kept = self._epoch.seen.kept()
        largest, others = kept[:1], kept[1:]
        others.sort(key=lambda each: -sum(torch.Size(sizes).numel() for sizes, _ in each.shape))
        by_rank = self._epoch.seen.kept()[1:_MOST_LARGEST]
        room = _MOST_HANDED - 1 - len(by_rank)
        rest = [each for each in others if each not in by_rank]
        chosen = largest + by_rank + _spread(rest, room)
        times = self._batches_per_step()
        # The first step frees what the loader itself has made; the second one is like the others.
        before = [chosen[0]] * times
        after = [chosen[-1]] * (2 * times)  # what a loop reads ahead is never trained on
        return before + [each for each in chosen for _ in range(times)] + after

    def _batches_per_step(self) -> int:
        """Return how many batches the loop reads between two updates."""
        before = self._fetched_at[: self._num_steps_before or None]
        counts = [each[self._source] for each in before]
        if len(counts) < 2:
            return 1
        return max(1, round((counts[-1] - counts[0]) / (len(counts) - 1)))

    def _recorded(self) -> Sequence[RecordedBatch]:
        """Find the step of each batch: by what its modules were called with, else by counting.

        A loop may drop what it has fetched (a limit on batches, a filter), so counting alone would
        give a batch the step of another.
        """
        varying = _varying(self._epoch.places)
        sizes = {kept.shape: _sizes_in(kept.shape, varying) for kept, _ in self._handed}
        shared = Counter(each for found in sizes.values() for each in found)
        marks = [
            frozenset(each for each in sizes[kept.shape] if shared[each] == 1)
            for kept, _ in self._handed
        ]
        times, place = self._batches_per_step(), 0
        steps: dict[int, RecordedBatch] = {}
        for step in range(self._num_steps_before, len(self._fetched_at)):
            seen = {mark for mark in marks if mark & self._inputs[step]}
            for number in range(place, min(place + _MOST_DROPPED * times, len(marks))):
                is_there = self._handed[number][1] < self._fetched_at[step][self._source]
                if is_there and seen == {marks[number]}:
                    kept = self._handed[number][0]
                    steps[kept.position] = self._at(kept, step, is_confirmed=True)
                    place = number + times
                    break
        return list(steps.values()) or self._counted()

    def _counted(self) -> list[RecordedBatch]:
        """Give the batches to the steps in turn."""
        steps: dict[int, RecordedBatch] = {}
        for kept, number in self._handed:
            step, left = divmod(number, self._batches_per_step())
            if not left and self._num_steps_before <= step < len(self._fetched_at):
                steps[kept.position] = self._at(kept, step, is_confirmed=False)
        return list(steps.values())

    def _at(self, kept: Kept, step: int, *, is_confirmed: bool) -> RecordedBatch:
        return RecordedBatch(
            position=kept.position,
            shape=self._epoch.places[kept.shape],
            step=step,
            is_confirmed=is_confirmed,
        )


def _of_its_own(batch: Any) -> Any:
    """Copy a batch, with real tensors in the place of fake ones."""
    with _disable_current_modes(), torch.no_grad():
        copies = {id(tensor): _real_copy(tensor) for tensor in batch_tensors(batch)}
        return copy.deepcopy(batch, dict(copies))


def _real_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor.clone()
    value = value_of(tensor)
    if value is None:
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    return value.clone()


def recorded_copy(
    *, has_card: bool, keep_values: Callable[[torch.Tensor, torch.Tensor], None]
) -> Copy:
    """Return what makes a tensor that the recorded script may see of one that was really read.

    Args:
        has_card: whether the host lies beside a card, and is real.
        keep_values: keeps the values of the second tensor beside the first, which is fake.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if has_card or isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        keep_values(fake, tensor)
        return fake

    return copied


def _sizes_in(shape: BatchShape, varying: set[int]) -> frozenset[tuple[int, ...]]:
    """Return the sizes of those tensors of a batch that tell batches apart."""
    return frozenset(sizes for number, (sizes, _) in enumerate(shape) if number in varying)


def _spread(kept: Sequence[Kept], count: int) -> list[Kept]:
    """Return some of many, evenly spread, the first and the last among them."""
    if len(kept) <= count:
        return list(kept)
    places = [round(number * (len(kept) - 1) / (count - 1)) for number in range(count)]
    return [kept[place] for place in places]


def _varying(shapes: Iterable[BatchShape]) -> set[int]:
    """Return which tensors of a batch have no one shape."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for shape in shapes:
        for number, (sizes, _) in enumerate(shape):
            seen.setdefault(number, set()).add(sizes)
    return {number for number, sizes in seen.items() if len(sizes) > 1}
