"""Has the second of two recorded steps repeat the forward and backward of the first.

Two steps are recorded since only the second has optimizer states. Forward and backward are alike in
both for nearly every job, and take most of the time of a recording. Where both steps of the job as
it is were recorded and were alike, event by event, what a plan's first step has done is copied into
its second one. The optimizer's update is recorded then as ever, on tensors that stand for the
gradients.

A pass is not copied if it leaves memory behind other than gradients and its loss, as a cache does
or a gradient scaler; if it ends what it has not made; if a strategy has passes of its own, or has
learnt in it what later forwards have to be begun from; or if parameters are updated inside.

Does not see state of the job's own code that decides what memory it takes, that holds none itself,
and that shows only under a plan: a count of calls, where micro-batches call more often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.comparison.gradients import accumulate_gradients
from memfit.forward_state import learning_noted
from memfit.session.session import PhaseListener, Session
from memfit.session.spill import Moved
from memfit.trace.abridgement import count_again
from memfit.trace.events import Phase
from memfit.trace.lent_memory import memory_of
from memfit.trace.recorder import Recorder
from memfit.trace.repeated_stretch import Copy, Place, Stretch, copy_of, left_by
from memfit.virtual.assumptions import Assumptions, Counts


@dataclass(frozen=True, slots=True)
class _Left:
    """A tensor that a pass has left: its allocation, and what a new one needs to stand for it."""

    allocation: int
    storage_bytes: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stand_in(self) -> torch.Tensor:
        """Make a tensor like it, in a storage like its own."""
        storage = torch.empty(
            self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device
        )
        return storage.as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A pass that was recorded, and the tensors that it has left."""

    stretch: Stretch
    gradients: tuple[tuple[torch.nn.Parameter, _Left], ...]
    loss: _Left
    count: _Left | None
    """What the loss was divided by, where that is a tensor."""
    moved: Moved
    answered: Counts
    """What was asked of values, and how often."""


class RepeatedPass:
    """Watch the passes of a session's steps; have later ones repeat the first if told to.

    Args:
        recorder: records the steps.
        session: is run, with its strategies in place.
        may_repeat: whether the steps of the job as it is were alike.
        assumptions: answers what nobody knows while a step is recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        session: Session,
        *,
        may_repeat: bool,
        assumptions: Assumptions,
    ) -> None:
        self._recorder, self._session = recorder, session
        self._may_repeat, self._assumptions = may_repeat, assumptions
        self._step: Place | None = None
        self._seen: list[_Seen | None] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch a step, which has just begun."""
        self._step = self._here()
        recorded = self._session.gradient_pass
        if recorded is not accumulate_gradients:  # some look at more the first time
            yield
            return

        def gradient_pass(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
            copy = self._copy() if self._may_repeat else None
            if copy is not None:
                return self._repeat(copy)
            begin, asked = self._here(), self._assumptions.counts
            has_moved = session.spill.has_moved
            with learning_noted() as learnt:
                loss = recorded(session, batch, enter_phase)
            is_otherwise = has_moved or bool(learnt)
            self._seen.append(None if is_otherwise else self._look(begin, asked, loss))
            return loss

        self._session.gradient_pass = gradient_pass
        try:
            yield
        finally:
            self._session.gradient_pass = recorded

    @property
    def is_alike(self) -> bool:
        """Return whether the first pass could have been copied to where the second one is."""
        if len(self._seen) != 2:
            return False
        first, second = self._seen
        if first is None or second is None or first.answered != second.answered:
            return False
        stretch, recorder = second.stretch, self._recorder
        made = copy_of(
            recorder.history,
            recorder.forward_starts,
            first.stretch,
            stretch.step,
            stretch.begin,
        )
        return made is not None and made.is_what_was_done(
            recorder.history, recorder.forward_starts, stretch
        )

    def _here(self) -> Place:
        return Place.at_end_of(self._recorder.history, self._recorder.forward_starts)

    def _look(self, begin: Place, asked: Counts, loss: torch.Tensor) -> _Seen | None:
        """Return what a pass has done; None if it cannot be copied."""
        assert self._step is not None, "a pass is part of a step"
        stretch = Stretch(step=self._step, begin=begin, end=self._here())
        session, left = self._session, left_by(self._recorder.history, stretch)
        if left is None or not self._is_plain:
            return None
        trained = [each for each in session.model.parameters() if each.grad is not None]
        gradients = [self._left(each.grad) for each in trained]
        count = session.num_counted
        others = [loss, count] if isinstance(count, torch.Tensor) else [loss]
        found = [each for each in (*gradients, *map(self._left, others)) if each is not None]
        if len(found) < len(gradients) + len(others):
            return None
        if sorted(left) != sorted(each.allocation for each in found):
            return None
        return _Seen(
            stretch=stretch,
            gradients=tuple(zip(trained, found, strict=False)),
            loss=found[len(trained)],
            count=found[-1] if len(others) > 1 else None,
            moved=session.spill.moved,
            answered={
                key: times - asked.get(key, 0) for key, times in self._assumptions.counts.items()
            },
        )

    @property
    def _is_plain(self) -> bool:
        """Return whether nothing is done in a pass that a later one may do otherwise."""
        session, order = self._session, self._session.job.order
        return not (
            order.keeps_gradients
            or order.num_batches > 1
            or session.updates_in_backward
            or session.parallel is not None
            or session.spill.is_beside_compute  # the first step makes its buffers
        )

    def _left(self, tensor: torch.Tensor | None) -> _Left | None:
        """Return what stands for a tensor; None if nothing can, or its memory is not counted."""
        is_known = (
            isinstance(tensor, FakeTensor)
            and tensor.layout is torch.strided
            and tensor.storage_offset() == 0
        )
        live = self._recorder.live.of(tensor) if tensor is not None and is_known else None
        if tensor is None or live is None:
            return None
        return _Left(
            live.index,
            tensor.untyped_storage().nbytes(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )

    def _copy(self) -> Copy | None:
        """Return the first pass as it is now; None if it has to be recorded once more."""
        first = self._seen[0] if self._seen else None
        if first is None or self._step is None:
            return None
        if not self._assumptions.stay_equal(first.answered):
            return None
        recorder = self._recorder
        found = copy_of(
            recorder.history, recorder.forward_starts, first.stretch, self._step, self._here()
        )
        if found is None:
            return None
        known = recorder.live.allocations() | set(found.names.values())
        used = (each for o in found.operations for each in (*o.reads, *o.changes))
        return found if known.issuperset(used) else None

    def _repeat(self, copy: Copy) -> torch.Tensor:
        """Add a copy of the first pass to the history, and leave what that has left."""
        first = self._seen[0]
        assert first is not None, "a copy was made of it"
        recorder = self._recorder
        copy.append_to(recorder.history, recorder.forward_starts)
        self._session.spill.move_again(first.moved)
        self._assumptions.count_again(first.answered)
        count_again(first.stretch.begin.counts, first.stretch.end.counts)
        recorder.phase = Phase.BACKWARD
        for parameter, gradient in first.gradients:
            parameter.grad = self._stand_in(gradient, copy)
        if first.count is not None:
            self._session.num_counted = self._stand_in(first.count, copy)
        return self._stand_in(first.loss, copy)

    def _stand_in(self, left: _Left, copy: Copy) -> torch.Tensor:
        """Make a tensor that lives where the copied pass has left one."""
        with self._recorder.paused():
            made = left.stand_in()
        self._recorder.live.add(memory_of(made), copy.names[left.allocation])
        return made
