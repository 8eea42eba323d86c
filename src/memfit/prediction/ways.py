"""Ways to record a step: whether fake tensors pass for real ones, and what becomes of their values.

A step that looks at values is recorded with answers in their place, which are listed. All others
are recorded without, so that nothing rests on an answer where none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.figures import BOUNDED_FIGURES, Answer, Certainty, Interval, Prediction, Term
from memfit.job import Job
from memfit.session.batches import real_batch, shapes_of
from memfit.session.borrowing import left_alone
from memfit.virtual.assumptions import Assumptions, Turned, other_values
from memfit.virtual.host_draws import HostDraws
from memfit.virtual.tensors import VirtualTensors, as_virtual
from memfit.virtual.with_values import TensorsWithValues

_MOST_EQUAL = 256
"""Rounds of a loop that only a value ends: more than fixed points take, and quickly recorded."""
_MOST_TURNED = 8
"""Answers that are turned, each by a recording of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a step is recorded."""

    is_disguised: bool = True
    """Whether fake tensors can pass for real ones; see ``virtual_tensors``."""
    is_answered: bool = False
    """Whether values that nobody knows are made up, and those of the batch are known."""
    is_skewed: bool = False
    """Whether routing and masks are answered as uneven as they can be, rather than balanced."""
    turned: Turned = ()
    """Single values that are answered otherwise; see ``Assumptions``."""
    most_equal: int = _MOST_EQUAL
    """How often a line hears the same value."""

    @property
    def other_spread(self) -> Self:
        """Return the way that answers unevenly what this one spreads evenly, or the reverse."""
        return replace(self, is_skewed=not self.is_skewed)

    def others(self, answers: Sequence[Answer]) -> Iterator[tuple[Answer | None, Self]]:
        """Yield ways that answer otherwise, each with the answer that code may branch on.

        The first, where sizes rest on answers, spreads choices unevenly, and comes without.
        """
        if any(answer.decides_sizes for answer in answers):
            yield None, self.other_spread
        for answer in answers[:_MOST_TURNED]:
            key = (answer.source_line, answer.operator)
            for value in other_values(answer):
                turned = {**dict(self.turned), key: value}
                yield answer, replace(self, turned=tuple(turned.items()))
            if answer.num_times > self.most_equal:  # a loop that nothing else ends
                yield answer, replace(self, most_equal=1)

    def then(self, *, has_card: bool) -> Iterator[tuple[Self, bool]]:
        """Yield this way, and what is tried where it fails for want of values.

        With each comes whether it counts only if nothing has to be made up. Code that looks at its
        batch may have a path for fake tensors that does not, but no real run takes that path: where
        all it asks for follows from the batch, it is recorded with that known.
        """
        yield self, False
        if not self.is_answered:
            answered = replace(self, is_disguised=True, is_answered=True)
            if has_card:  # a mask decides which kernels a card takes
                yield answered, True
            yield replace(self, is_disguised=not self.is_disguised), False
            yield answered, False


def mode_of(way: Way, assumptions: Assumptions) -> Callable[..., VirtualTensors]:
    """Return what makes the fake mode for a way."""
    if not way.is_answered:
        return partial(VirtualTensors, assumptions=assumptions)

    def make(*, has_card: bool) -> VirtualTensors:
        # Batches are there already, so that their order does not hang on how weights are drawn.
        draws = HostDraws(most_numbers=0)
        return TensorsWithValues(has_card=has_card, assumptions=assumptions, draws=draws)

    return make


def batch_for(job: Job, way: Way) -> Any:
    """Return a batch of the job's: of fake tensors, or where values are wanted of real ones.

    Raises:
        JobFunctionError: if the batch function fails.
    """
    if not way.is_answered:
        return shapes_of(job, job.batch_size)
    with left_alone(job):
        # Copies, because what the step changes in its batch is changed in the values too.
        return tree_map_only(torch.Tensor, _copy, real_batch(job, job.batch_size))


def fake_batch(mode: VirtualTensors, batch: Any, way: Way) -> Any:
    """Return a batch as fake tensors of the mode, with the values that are known beside them."""
    fake = as_virtual(mode, batch)
    if way.is_answered:
        keep = cast(TensorsWithValues, mode).keep_values
        for made, value in zip(tree_leaves(fake), tree_leaves(batch), strict=True):
            if type(value) is torch.Tensor and value.layout is torch.strided:
                keep(made, value)
    return fake


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return tensor.detach().clone() if is_plain else tensor


def turned(prediction: Prediction, other: Prediction, answer: Answer) -> Prediction:
    """Return a prediction that reaches to another one where an answer makes a difference."""
    figures = BOUNDED_FIGURES.values()
    if all(getattr(prediction, each) == getattr(other, each) for each in figures):
        return prediction
    key = (answer.source_line, answer.operator)
    answers = tuple(
        replace(each, decides_sizes=True) if (each.source_line, each.operator) == key else each
        for each in prediction.answers
    )
    return widened(replace(prediction, answers=answers), other)


def widened(prediction: Prediction, other: Prediction) -> Prediction:
    """Return a prediction whose intervals reach to another one, and which fits if both do.

    Args:
        prediction: with choices spread one way.
        other: the same with choices spread the other way.
    """
    fits = None if prediction.fits is None else bool(prediction.fits and other.fits)
    intervals = {figure: _around((prediction, other), figure) for figure in BOUNDED_FIGURES}
    widened = replace(prediction, intervals=intervals, fits=fits)
    if prediction.peak_allocated_bytes == other.peak_allocated_bytes:
        return widened
    terms = [_less_certain(*pair) for pair in zip(prediction.terms, other.terms, strict=False)]
    return replace(widened, certainty=Certainty.GUESS, terms=terms)


def _less_certain(term: Term, other: Term) -> Term:
    """Return a term that is a guess where it comes out otherwise the other way."""
    is_same = term.name != other.name or term.num_bytes == other.num_bytes
    return term if is_same else replace(term, certainty=Certainty.GUESS)


def _around(predictions: Sequence[Prediction], figure: str) -> Interval:
    """Return the interval that holds those of several predictions."""
    own = [each.intervals.get(figure) or _point(each, figure) for each in predictions]
    return Interval(
        low_bytes=min(each.low_bytes for each in own),
        high_bytes=max(each.high_bytes for each in own),
    )


def _point(prediction: Prediction, figure: str) -> Interval:
    num_bytes: int = getattr(prediction, BOUNDED_FIGURES[figure])
    return Interval(low_bytes=num_bytes, high_bytes=num_bytes)
