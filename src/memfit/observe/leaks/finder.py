"""Finds what keeps growing, from calls at the same place of each step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import torch

from memfit.journal.records import LeakEvent

from .examination import OPTIMIZER_STREAM, Examination
from .limits import LeakLimits
from .lines import LineWatch
from .naming import Namer, Verdict
from .outside import OutsideWatch
from .signals import MemoryInUse, memory_in_use
from .streams import Stream
from .walk import LineSearch, Look, find_lines, take_look, ways_to

_MOST_WATCHES = 4
_MOST_TRIES = 2
_WATCHED_STEPS = 2
_STEPS_BEFORE_LOOK = 8
_PROBE_INTERVAL = 2
_SUSPICIOUS_BYTES = 65_536
_MOST_SUSPICIOUS_BYTES = 16 * _SUSPICIOUS_BYTES
_READ_ERRORS = (
    *(AttributeError, TypeError, ValueError, KeyError, IndexError),
    *(RuntimeError, ReferenceError, RecursionError),
)
_MOST_FAILURES = 3
_FREE_SECONDS = 0.05
"""What may be spent in short runs as well."""
_SHARES = {"probe": 0.25, "frequent probe": 0.1, "look": 0.6, "look that can wait": 0.3}
"""Of the budget; what is more frequent leaves room for what has its one moment."""
_MOST_EXTRA_LOOKS = 40
"""Beyond the budget, after a suspicion."""
_FREE_EXTRA_SECONDS, _EXTRA_FRACTION = 3.0, 0.02
"""All calls together may have taken so long before another look beyond the budget is taken."""
_NUM_RECENT = 4


class LeakFinder:
    """Find what keeps growing over equal steps, and name what holds it.

    Call ``boundary`` at the same place of each step, and ``finish`` at the end, while the program's
    variables still exist. Nothing is kept alive, and no code of the program is called.

    Args:
        on_leak: called with each finding as it is made.
        overhead_fraction: the share of the time that ``boundary`` may take until something is
            suspected; 50 ms are free.
        limits: from when on growth counts.
    """

    def __init__(
        self,
        on_leak: Callable[[LeakEvent], None] | None = None,
        *,
        overhead_fraction: float = 0.005,
        limits: LeakLimits | None = None,
    ) -> None:
        self._on_leak = on_leak
        self._budget = TimeBudget(overhead_fraction)
        self._streams: dict[str, Stream] = {}
        limits, self._memory_bytes = limits or LeakLimits(), _memory_bytes()
        self._examination = Examination(
            limits=limits, memory_bytes=self._memory_bytes, streams=self._streams
        )
        self._outside = OutsideWatch(limits, self._memory_bytes)
        self._namer = Namer()
        self._lines = LineWatch()
        self._line_of: dict[int, str] = {}
        self._ways: set[int] = set()
        self._tries: dict[int, int] = {}
        self._num_watches = 0
        self._watch_end: tuple[Stream, int] | None = None
        self._pending: list[Verdict] = []
        self._memory_at_look: dict[str, MemoryInUse] = {}
        self._suspicious_bytes = _SUSPICIOUS_BYTES
        self._num_failures = 0
        self._index = 0
        self._step = 0
        self._process = os.getpid()
        self._is_done = False
        self.failure: str | None = None
        """Why leaks are looked for no more before the end; None while they are."""

    @property
    def findings(self) -> tuple[LeakEvent, ...]:
        """Return what was found so far."""
        return self._namer.events

    @property
    def spent_seconds(self) -> float:
        """Return the time that all calls took together."""
        return self._budget.spent_seconds

    def end_of_pass(self, stream: str) -> None:
        """Note that a pass over the data of a stream is over; where known, it sharpens the eye."""
        if stream in self._streams:
            self._streams[stream].end_pass()

    def boundary(self, stream: str, step: int, batch_bytes: int | None = None) -> None:
        """Note the end of a step; look around where that is due.

        Args:
            stream: what runs: ``train``, ``validation`` or a loader's name.
            step: the number of the step; one that falls begins a new pass.
            batch_bytes: the size of its batch, where known.
        """
        started = time.perf_counter()
        self._budget.begin(started)
        current = self._streams.get(stream)
        if current is None:
            current = self._streams[stream] = Stream(stream)
        self._index += 1
        if stream == OPTIMIZER_STREAM or OPTIMIZER_STREAM not in self._streams:
            self._step = step
        current.note(self._index, step, batch_bytes)
        if not self._is_done:
            self._act(current, started)
        self._budget.spent_seconds += time.perf_counter() - started

    def finish(self) -> tuple[LeakEvent, ...]:
        """Look a last time, let go of everything, and give all that was found."""
        if self._is_done or os.getpid() != self._process:
            return self.findings
        current = max(self._streams.values(), key=Stream.last_index, default=None)
        if current is not None and self._index > 1:
            over = self._pass_over(current) or _nearly_over(current)
            self._look(current, over, "the end")
        if self._is_done:  # the last look failed
            return self.findings
        self._lines.end()
        self._lines.forget()
        self._tell_pending()
        self._tell(self._outside.last_findings(self._examination, self._step))
        self._is_done = True
        self._streams.clear()
        self._examination.forget()
        return self.findings

    def abandon(self) -> None:
        """Tell what was found so far, and look no more."""
        self._is_done = True
        self._lines.end()
        self._lines.forget()
        self._tell_pending()
        self._streams.clear()
        self._examination.forget()

    def _act(self, current: Stream, now_seconds: float) -> None:
        """Do what is due at a boundary; mostly nothing, so that is found out first."""
        over = self._pass_over(current)
        if self._watch_end is not None:
            stream, count = self._watch_end
            if stream.count >= count or over is stream:
                self._look(current, over, "lines")
            return
        is_due = current.count >= current.next_look and not self._is_beside_training(current)
        is_wanted = is_due or over is not None
        in_use = None
        if is_wanted or not self._index % _PROBE_INTERVAL:
            in_use = self._probe(current, now_seconds, is_wanted=is_wanted)
        if is_wanted:
            reason = self._reason_to_look(current, over, in_use, now_seconds)
            if reason is not None:
                self._look(current, over, reason)
            elif over is None:
                current.postpone_look()
        if self._examination.suspects:
            self._maybe_watch(current)

    def _is_beside_training(self, current: Stream) -> bool:
        """Return whether optimizer steps run in turns with this stream; looks are taken at them."""
        training = self._streams.get(OPTIMIZER_STREAM)
        is_other = training is not None and training is not current
        return is_other and training is not None and not training.is_between_passes(self._index)

    def _probe(self, current: Stream, now_seconds: float, *, is_wanted: bool) -> MemoryInUse | None:
        """Read the memory if there is time for it: rather before a look than anywhere."""
        is_frequent = current.count < current.next_look - _STEPS_BEFORE_LOOK
        if not is_wanted and not self._budget.allows_probe(now_seconds, is_frequent=is_frequent):
            return None
        in_use = memory_in_use()
        self._outside.add(current, in_use, self._index)
        self._budget.probed(time.perf_counter() - now_seconds)
        return in_use

    def _reason_to_look(
        self, current: Stream, over: Stream | None, in_use: MemoryInUse | None, now_seconds: float
    ) -> str | None:
        """Say why a look is taken where one is due: it can be afforded, or memory grows."""
        if self._budget.allows_look(now_seconds, can_wait=over is None):
            return "due"
        is_suspicious = self._is_suspicious(current, in_use, is_exact=over is not None)
        return "suspicion" if is_suspicious and self._budget.take_extra() else None

    def _is_suspicious(
        self, current: Stream, in_use: MemoryInUse | None, *, is_exact: bool
    ) -> bool:
        """Return whether memory in use has grown since the last look at the same place."""
        before = self._memory_at_look.get(current.name)
        if in_use is None or before is None:
            return False
        if not is_exact:  # the least of the last steps, since batches differ
            in_use = self._outside.least_recent(current, in_use)
        return in_use.above(before) >= self._suspicious_bytes

    def _pass_over(self, current: Stream) -> Stream | None:
        """Return the stream whose pass is just over, and after which was not looked yet."""
        if len(self._streams) == 1 and current.pass_number == 1:
            return None
        for stream in self._streams.values():
            if stream.looked_after_pass >= stream.pass_number:
                continue
            if stream is current:
                if stream.pass_number > 1 and stream.position == stream.previous_length:
                    return stream
            elif stream.is_between_passes(self._index):
                return stream
        return None

    def _look(self, current: Stream, over: Stream | None, reason: str) -> None:
        """Take a look, judge it and tell what is found."""
        in_use = memory_in_use()
        self._memory_at_look[current.name] = self._outside.least_recent(current, in_use)
        current.plan_next_look()
        if over is not None:
            over.looked_after_pass = over.pass_number
        if self._watch_end is not None:
            self._end_watch()
        look = self._taken_look()
        if look is None:
            return
        if reason == "due":
            self._budget.looked(look.took_seconds)
        verdicts = self._examination.add(look, current, over, self._index)
        self._ways = ways_to(look, self._examination.suspects)
        if reason == "suspicion" and not self._examination.is_anything_growing:
            self._suspicious_bytes = min(2 * self._suspicious_bytes, _MOST_SUSPICIOUS_BYTES)
        self._pending += [each for each in verdicts if not self._namer.is_told(each.growth)]
        if not self._is_waiting_for_lines():
            self._tell_pending()
        self._tell(self._outside.check(current, self._examination, look, self._step))

    def _taken_look(self) -> Look | None:
        if len(self._memory_bytes) == 1:  # CUDA may have been started since
            self._memory_bytes.update(_memory_bytes())
        try:
            return take_look()
        except _READ_ERRORS as error:
            # An object that cannot be read is no reason to stop a training run.
            self._num_failures += 1
            if self._num_failures >= _MOST_FAILURES:
                self.failure = f"{type(error).__name__}: {error}"
                self.abandon()
            return None

    def _maybe_watch(self, current: Stream) -> None:
        """Begin to note lines if something that grows in this stream has none yet."""
        if self._num_watches >= _MOST_WATCHES or self._watch_end is not None:
            return
        wanted = [key for key in self._without_line() if self._grows_in(key, current)]
        if not wanted:
            return
        for key in wanted:
            self._tries[key] = self._tries.get(key, 0) + 1
        self._num_watches += 1
        self._lines.begin()
        self._watch_end = (current, current.count + _WATCHED_STEPS)

    def _grows_in(self, key: int, current: Stream) -> bool:
        return self._examination.suspects[key] == current.name or any(
            verdict.growth.node.key == key for verdict in self._pending
        )

    def _without_line(self) -> list[int]:
        return [
            key
            for key in self._examination.suspects
            if key not in self._line_of and self._tries.get(key, 0) < _MOST_TRIES
        ]

    def _end_watch(self) -> None:
        """Take the lines that were noted; noting ends before everything is looked at."""
        suspects = self._examination.suspects
        search = LineSearch(suspects=suspects, ways=self._ways, lines=self._lines)
        try:
            found = find_lines(search)
        except _READ_ERRORS:  # the look that follows meets it as well, and counts it
            found = {}
        if self._lines.end():
            self._watch_end = None
            self._line_of = {**found, **self._line_of}

    def _is_waiting_for_lines(self) -> bool:
        """Return whether a few steps more will give the lines of what was found."""
        if self._num_watches >= _MOST_WATCHES:
            return False
        without = set(self._without_line())
        return any(
            verdict.growth.node.key in without and not verdict.growth.num_passes
            for verdict in self._pending
        )

    def _tell_pending(self) -> None:
        pending, self._pending = self._pending, []
        self._tell_events(self._namer.tell(pending, self._line_of, self._step))

    def _tell(self, events: list[LeakEvent]) -> None:
        for event in events:
            self._namer.add(event)
        self._tell_events(events)

    def _tell_events(self, events: list[LeakEvent]) -> None:
        if self._on_leak is not None:
            for event in events:
                self._on_leak(event)


def _nearly_over(current: Stream) -> Stream | None:
    """Take a pass that has come as far as the one before for a whole one."""
    is_long = current.pass_number > 1 and 2 * current.position >= current.previous_length
    return current if is_long and current.looked_after_pass < current.pass_number else None


def _memory_bytes() -> dict[str, int]:
    """Return the memory of the host and of each GPU in use; asking for GPUs would start CUDA."""
    found = {"host": int(psutil.virtual_memory().total)}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = torch.cuda.get_device_properties(index).total_memory
    return found


class TimeBudget:
    """Say what can be afforded."""

    def __init__(self, overhead_fraction: float) -> None:
        self._fraction = overhead_fraction
        self._begun_seconds: float | None = None
        self._probe_seconds = 0.0
        self._look_seconds = 0.0
        self._recent: list[float] = [0.004]  # a guess before the first
        self._num_extra = 0
        self.spent_seconds = 0.0
        """Of all calls together, what a suspicion led to included."""

    def begin(self, now_seconds: float) -> None:
        """Note the first call."""
        if self._begun_seconds is None:
            self._begun_seconds = now_seconds

    def allows_probe(self, now_seconds: float, *, is_frequent: bool) -> bool:
        """Return whether memory in use may be read."""
        share = _SHARES["frequent probe" if is_frequent else "probe"]
        return self._probe_seconds < share * self._total(now_seconds)

    def allows_look(self, now_seconds: float, *, can_wait: bool) -> bool:
        """Return whether a look can be taken within the budget."""
        share = _SHARES["look that can wait" if can_wait else "look"]
        needed_seconds = self._look_seconds + min(self._recent)
        return needed_seconds <= share * self._total(now_seconds)

    def take_extra(self) -> bool:
        """Take one of the looks beyond the budget; False if there is none left, or no time."""
        now_seconds = time.perf_counter()
        begun = self._begun_seconds if self._begun_seconds is not None else now_seconds
        most_seconds = _FREE_EXTRA_SECONDS + max(_EXTRA_FRACTION, self._fraction) * (
            now_seconds - begun
        )
        if self.spent_seconds > most_seconds:
            return False
        self._num_extra += 1
        return self._num_extra <= _MOST_EXTRA_LOOKS

    def probed(self, seconds: float) -> None:
        """Note what reading it took."""
        self._probe_seconds += seconds

    def looked(self, seconds: float) -> None:
        """Note what a look within the budget took."""
        self._look_seconds += seconds
        self._recent = [*self._recent[-_NUM_RECENT + 1 :], seconds]

    def _total(self, now_seconds: float) -> float:
        begun = self._begun_seconds if self._begun_seconds is not None else now_seconds
        return _FREE_SECONDS + self._fraction * (now_seconds - begun)
