"""Computes a real batch's gradients in pieces of several sizes, and says whether they agree."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.comparison.left_behind import LeftBehind, differing_values, left_behind, unsteady_names
from memfit.comparison.left_behind import without as left_without
from memfit.comparison.precision import CastsKept, PrecisionWatch, bound_in, smallest_share_in
from memfit.comparison.relative_errors import relative_errors
from memfit.comparison.same_start import copies_in_place
from memfit.forward_state.random_draws import RandomPositions
from memfit.live_state import LiveState, Snapshot
from memfit.live_state.disk_copies import DiskCopies
from memfit.live_state.reading import tensors_of
from memfit.session.conversion import converted, copied, default_dtype
from memfit.session.deterministic_draws import DeterministicDraws
from memfit.session.reachable import kept_by_others, live_state_of, roots_of
from memfit.session.session import GradientPass, Session
from memfit.session.stand_ins import optimizer_tensors

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitComparison:
    """How far gradients of one batch are apart when it is computed in pieces of several sizes."""

    sizes: tuple[int, ...]
    """Samples per piece; the first is what the others are held against."""
    largest_error: float
    """|gradient - reference| / |reference|, the largest over parameters, sizes and the loss."""
    worst_parameter: str
    """Whose gradient that is; ``the loss`` where it is the loss."""
    worst_size: int
    effects: tuple[str, ...]
    """What else the pieces leave otherwise, a sentence each: counts, buffers, attributes."""
    bound: float
    """Up to this error, equal up to rounding."""
    dtype: str
    """The roughest floating-point type that was computed in."""
    num_draws: int
    """Random draws that were replaced by fixed values."""
    still_random: tuple[str, ...]
    """Random draws that were not, so that a difference may be theirs."""

    @property
    def agrees(self) -> bool:
        """Return whether nothing depends on how the batch is split."""
        return self.largest_error <= self.bound and not self.effects


def compare_splits(
    session: Session,
    batch: Any,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    keeps_casts: bool = False,
    gradient_pass: GradientPass | None = None,
    copies_parameters: bool = True,
) -> SplitComparison:
    """Compute the gradients of a batch once per size of its pieces, and compare them.

    Forward and backward are run on the session's own objects, from the same state each
    time, with deterministic random draws. Nothing is updated; everything is as it was at the end.

    Args:
        session: with or without strategies.
        batch: on the session's device; laid out like the job's.
        sizes: samples per piece; the first size, usually the whole batch, is the reference.
        dtype: the type of all floating-point tensors, of which copies are then made; None computes
            with the session's own tensors as they are.
        keeps_casts: whether what the step casts from fp64 to less stays in fp64.
        gradient_pass: what computes gradients; None takes the session's,
            or the plain one where the session's updates parameters as it goes.
        copies_parameters: whether to keep the content of parameters and optimizer states, which
            only unusual code changes in forward or backward. Costs their size once more.

    Raises:
        ValueError: if there are fewer than two sizes.
        StrategyError: if each piece leaves something else behind, so that none could be kept.
        MemfitError: if the job's loss fails on a piece, or something cannot be put back.

    Limits: draws of numpy, ``random`` and generators of the user's own that are not torch's start
    from the same state each time and still move, which is told: what agrees may do so by chance.
    """
    if len(set(sizes)) < 2:
        msg = f"At least two different sizes are needed to compare, not {list(sizes)}."
        raise ValueError(msg)
    if gradient_pass is None:
        updates = session.updates_in_backward  # such a pass would leave no gradients
        gradient_pass = accumulate_gradients if updates else session.gradient_pass
    engine = _Engine(session, batch, dtype, gradient_pass)
    engine.casts = CastsKept() if keeps_casts else nullcontext()
    with engine.everything_put_back(copies_parameters=copies_parameters):
        return engine.compared(list(dict.fromkeys(sizes)))


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass over the batch gave."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    left: LeftBehind


class _Engine:
    """Run gradient passes from one state."""

    def __init__(
        self, session: Session, batch: Any, dtype: torch.dtype | None, gradient_pass: GradientPass
    ) -> None:
        self._session, self._batch, self._dtype = session, batch, dtype
        self._gradient_pass = gradient_pass
        self._draws = DeterministicDraws()
        self._watch = PrecisionWatch()
        self._copies = DiskCopies()
        """What is kept takes nothing beside a step that is planned to fit."""
        self._state = live_state_of(session, copies_parameters=True, gradients=True)
        self._begin: Snapshot | None = None
        self._replaced: Sequence[torch.Tensor] = ()
        """What converted copies stand in for: all tensors that the step can reach, or none."""
        self.casts: AbstractContextManager[object] = nullcontext()

    @contextmanager
    def everything_put_back(self, *, copies_parameters: bool) -> Iterator[None]:
        """Keep the state, and have it put back after each pass and at the end."""
        session = self._session
        copies_parameters = copies_parameters and self._dtype is None
        self._begin = LiveState(
            {**roots_of(session), "batch": self._batch},
            leave_out=() if copies_parameters else kept_by_others(session),
            gradients=True,
            most_bytes=sys.maxsize,
            copied=self._copies,
        ).snapshot()
        if self._dtype is not None:
            job = session.job
            used = {"model": session.model, "optimizer": session.optimizer, "loss": job.loss}
            self._replaced = tensors_of(LiveState(used))
        size_before, counted_before = session.micro_batch_size, session.num_counted
        try:
            yield
        finally:
            session.micro_batch_size, session.num_counted = size_before, counted_before
            self._begin.restore()

    def compared(self, sizes: Sequence[int]) -> SplitComparison:
        """Compare all sizes with the first one."""
        reference = self._passed(sizes[0], watches=True)
        lowest = self._watch.lowest
        bound, worst, effects = bound_in(lowest), (0.0, "", sizes[0]), list[str]()
        share = smallest_share_in(lowest)
        unsteady: frozenset[str] | None = None
        for size in sizes[1:]:
            found = self._passed(size)
            worst = max(worst, (*_worst_error(found, reference, share), size))
            told = _effects(found.left, reference.left, bound)
            if told and unsteady is None:
                # Clocks and the like differ between two equal passes as well.
                unsteady = unsteady_names(reference.left, self._passed(sizes[0]).left)
            if told and unsteady is not None:
                told = _effects(
                    left_without(found.left, unsteady),
                    left_without(reference.left, unsteady),
                    bound,
                )
            effects += told
        return SplitComparison(
            sizes=tuple(sizes),
            largest_error=worst[0],
            worst_parameter=worst[1],
            worst_size=worst[2],
            effects=tuple(dict.fromkeys(effects))[:_MOST_NAMED],
            bound=bound,
            dtype=str(lowest).removeprefix("torch."),
            num_draws=self._draws.num_draws,
            still_random=tuple(sorted(self._draws.still_random)),
        )

    def _passed(self, num_samples: int, *, watches: bool = False) -> _Pass:
        """Run forward and backward in pieces of a size, and put everything back."""
        assert self._begin is not None, "the state is kept by then"
        try:
            with copies_in_place(self._replaced, self._dtype):
                return self._run(num_samples, watches=watches)
        finally:
            self._begin.restore()

    def _run(self, num_samples: int, *, watches: bool) -> _Pass:
        session, dtype = self._session, self._dtype
        batch = self._batch if dtype is None else converted(copied(self._batch), dtype)
        session.micro_batch_size = num_samples
        for parameter in session.model.parameters():
            parameter.grad = None
        assert self._begin is not None, "the state is kept by then"
        positions = RandomPositions([generator for _, generator, *_ in self._begin.generators])
        with (
            default_dtype(dtype or torch.get_default_dtype()),
            torch.enable_grad(),
            self.casts,
            self._watch if watches else nullcontext(),
            self._draws,
        ):
            loss = self._gradient_pass(session, batch, _no_listener)
        if source := positions.first_moved():
            self._draws.still_random.add(source)
        gradients = {
            name: self._copies.of(parameter.grad)
            for name, parameter in session.model.named_parameters()
            if parameter.grad is not None
        }
        return _Pass(self._copies.of(loss), gradients, self._left())

    def _left(self) -> LeftBehind:
        """Read what the pass has left, apart from what the next one changes in place."""
        model = self._session.model
        states = (tensor for _, tensor in optimizer_tensors(self._session.optimizer))
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        left = left_behind(self._state, (*model.parameters(), *states, *gradients))
        copies = {name: self._copies.of(tensor) for name, tensor in left.tensors.items()}
        return LeftBehind(copies, left.values, left.generators)


def _worst_error(found: _Pass, reference: _Pass, smallest_share: float) -> tuple[float, str]:
    """Return the largest relative error, and of what."""
    errors = {
        **relative_errors({"the loss": found.loss}, {"the loss": reference.loss}),
        **relative_errors(found.gradients, reference.gradients, smallest_share),
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _effects(found: LeftBehind, reference: LeftBehind, bound: float) -> list[str]:
    """Return what the two passes have left otherwise."""
    errors = relative_errors(found.tensors, reference.tensors)
    tensors = [
        f"{name}: off by {error:.1g} (relative)" for name, error in errors.items() if error > bound
    ]
    return [*differing_values(found, reference, ("in pieces", "in one piece")), *tensors]


def _no_listener(_phase: object) -> None:
    """Follow no phases."""
