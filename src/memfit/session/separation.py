"""Finds out whether a job's step can be carried out in pieces of its batch, without running it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from memfit.analysis.alignment import RecordingsDifferError
from memfit.analysis.dataflow import Dataflow, DataflowRecorder
from memfit.analysis.flow import Axis, Flow, Kind
from memfit.analysis.judgement import Ends, judge
from memfit.analysis.layouts import one_path
from memfit.analysis.separability import PROVED, Separability, not_known, refuted
from memfit.analysis.use import Sizes
from memfit.analysis.walk import follow
from memfit.errors import JobFunctionError, MemfitError
from memfit.job import Job, Total
from memfit.session.batches import BatchLayout, shapes_of
from memfit.session.session import Session, open_session
from memfit.session.stilled_randomness import untouched_randomness
from memfit.trace.virtual import ValuesNeededError, as_virtual, virtual_tensors

_SMALL_SIZES = (2, 3)
"""Sizes that are looked at besides those that are asked for: thresholds on the batch size."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step at one batch size, and where its ends lie in the recording."""

    dataflow: Dataflow
    leaves: tuple[int | None, ...]
    """Numbers of the batch's tensors."""
    lasting: dict[int, str]
    begins: tuple[int, ...]
    """Numbers of all tensors that the step begins with."""
    ends: Ends


class Separation:
    """Say for each micro-batch size whether pieces of the batch keep the results; found once.

    Forward, loss and backward are recorded on fake tensors at the batch size, at the size of a
    micro-batch, of the last one, and of two or three samples, and compared.

    Args:
        job: whose step.
        layout: of its batches.
    """

    def __init__(self, job: Job, layout: BatchLayout) -> None:
        self.job, self.layout = job, layout
        self._recordings: dict[int, _Recorded | MemfitError] = {}
        self._followed: dict[tuple[int, bool], Separability] = {}
        self._settled: dict[tuple[int, bool], Separability] = {}
        self._others: dict[int, Separation] = {}
        self._is_disguised: bool | None = None

    def of(self, micro_batch_size: int, *, given_statistics: bool = False) -> Separability:
        """Say whether micro-batches of a size keep the results.

        Args:
            micro_batch_size: of all but perhaps the last.
            given_statistics: whether batch normalisation takes its statistics as given, as
                batchnorm-replay has it.
        """
        settled = self._settled.get((micro_batch_size, given_statistics))
        return settled or self._found(micro_batch_size, given_statistics)

    def settle(
        self, micro_batch_size: int, found: Separability, *, given_statistics: bool = False
    ) -> None:
        """Keep what a trial on a real batch has shown of a size that could not be followed."""
        self._settled[micro_batch_size, given_statistics] = found

    def at_batch_size(self, batch_size: int) -> Separation:
        """Give the same for batches of another size, such as the last one of an epoch."""
        if batch_size == self.job.batch_size:
            return self
        if batch_size not in self._others:
            job = replace(self.job, batch_size=batch_size)
            self._others[batch_size] = Separation(job, self.layout)
        return self._others[batch_size]

    def _found(self, micro_batch_size: int, given_statistics: bool) -> Separability:
        whole = self.job.batch_size
        if micro_batch_size >= whole:
            return PROVED
        if isinstance(self._recording(whole), MemfitError):
            return not_known(_not_recorded(self._recording(whole)))
        small = next((n for n in _SMALL_SIZES if n < whole and self._runs(n)), None)
        wanted = dict.fromkeys((small, micro_batch_size, whole % micro_batch_size))
        found: list[Separability] = []
        for size in filter(None, wanted):
            found.append(self._at(size, given_statistics))
            if found[-1].is_refuted:
                break  # a few samples refute every size, and need not be looked at again
        return _worst(found)

    def _runs(self, size: int) -> bool:
        return not isinstance(self._recording(size), MemfitError)

    def _at(self, size: int, given_statistics: bool) -> Separability:
        key = (size, given_statistics)
        if key not in self._followed:
            self._followed[key] = self._compared(size, given_statistics)
        return self._followed[key]

    def _compared(self, size: int, given_statistics: bool) -> Separability:
        whole, part = self._recording(self.job.batch_size), self._recording(size)
        assert not isinstance(whole, MemfitError)
        if isinstance(part, MemfitError):
            return refuted(_fails_on_parts(size, part))
        sizes = Sizes(self.job.batch_size, size)
        known: dict[int, Flow | None] = dict.fromkeys(whole.begins)
        known.update(self._batch_flows(whole, part))
        try:
            followed = follow(
                (whole.dataflow, part.dataflow),
                sizes,
                known,
                whole.lasting,
                given_statistics=given_statistics,
            )
        except RecordingsDifferError as error:
            return refuted(_differs(size, error.culprit.place()), error.culprit)
        return judge(followed, whole.ends, part.ends, sizes)

    def _batch_flows(self, whole: _Recorded, part: _Recorded) -> Iterator[tuple[int, Flow]]:
        """Say where the batch's tensors hold samples."""
        for index, (number, place) in enumerate(zip(whole.leaves, self.layout.dims, strict=True)):
            if number is None:
                continue
            num_dims = len(whole.dataflow.shapes[number].size)
            axes: list[Axis | None] = [None] * num_dims
            kind = Kind.FREE
            if place is not None:
                axes[place.dim] = Axis(outer=1, inner=place.per_sample)
                kind = Kind.EACH
            elif whole.dataflow.shapes[number].size != part.dataflow.shapes[number].size:
                continue
            sources = frozenset([index])
            yield number, Flow(kind=kind, axes=tuple(axes), sources=sources)

    def _recording(self, size: int) -> _Recorded | MemfitError:
        if size not in self._recordings:
            self._recordings[size] = self._recorded(size)
        return self._recordings[size]

    def _recorded(self, size: int) -> _Recorded | MemfitError:
        """Record a step at a batch size, or say why it cannot be."""
        ways = (True, False) if self._is_disguised is None else (self._is_disguised,)
        error: MemfitError | None = None
        for disguised in ways:
            try:
                with _undisturbed():
                    found = _record(self.job, self.layout, size, disguised=disguised)
            except ValuesNeededError as problem:
                error = error or problem
                continue
            except MemfitError as problem:
                return problem
            except Exception as problem:  # noqa: BLE001 - whatever the job's code may raise
                return MemfitError(f"{type(problem).__name__}: {problem}")
            self._is_disguised = disguised
            return found
        assert error is not None, "there is at least one way"
        return error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep other modes, random states and warnings out of it."""
    with (
        _disable_current_modes(),
        untouched_randomness(),
        torch.enable_grad(),  # an evaluation asks without
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # code for whole batches may warn about small ones
        yield


def _record(job: Job, layout: BatchLayout, size: int, *, disguised: bool) -> _Recorded:
    shapes = shapes_of(job, size)
    with virtual_tensors(disguised=disguised) as mode:
        batch = as_virtual(mode, shapes)
        session = open_session(job, "cpu", layout, _no_gradients)
        recorder = DataflowRecorder(session.model)
        with recorder, one_path():
            leaves = tuple(
                recorder.number_of(leaf) if isinstance(leaf, torch.Tensor) else None
                for leaf in tree_leaves(batch)
            )
            lasting = {recorder.number_of(tensor): name for name, tensor in _lasting(session)}
            begins = tuple(recorder.flow.foreign)
            loss = session.loss_of(batch)
            value = loss.sum if isinstance(loss, Total) else loss * (size / job.batch_size)
            value.backward()
        return _Recorded(recorder.flow, leaves, lasting, begins, _ends(recorder, session, loss))


def _no_gradients(*_: object) -> torch.Tensor:
    raise AssertionError("gradients are computed by hand here")


def _lasting(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that outlive a step, by name."""
    yield from session.model.named_parameters()
    yield from session.model.named_buffers()


def _ends(recorder: DataflowRecorder, session: Session, loss: torch.Tensor | Total) -> Ends:
    """Say where loss and gradients lie in the recording."""
    parameters = dict(session.model.named_parameters())
    names = {id(parameter) for parameter in parameters.values()}
    for group in session.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                parameters[f"a parameter of the optimizer, shape {tuple(parameter.shape)}"] = (
                    parameter
                )
    gradients = {
        name: recorder.number_of(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    if not isinstance(loss, Total):
        return Ends(loss=recorder.number_of(loss), gradients=gradients)
    count: Any = loss.count
    return Ends(
        loss=recorder.number_of(loss.sum),
        gradients=gradients,
        is_total=True,
        count=recorder.number_of(count) if isinstance(count, torch.Tensor) else float(count),
    )


def _worst(found: list[Separability]) -> Separability:
    """Give the first refutation, else the first that is not known, else the proof."""
    for wanted in (lambda each: each.is_refuted, lambda each: not each.is_proved):
        worst = next((each for each in found if wanted(each)), None)
        if worst is not None:
            return worst
    conditions = dict.fromkeys(c for each in found for c in each.conditions)
    draws = any(each.draws for each in found)
    return replace(PROVED, draws=draws, conditions=tuple(conditions))


def _not_recorded(error: object) -> str:
    return f"the step cannot be recorded: {_short(error)}"


def _short(error: object) -> str:
    if isinstance(error, JobFunctionError):
        return error.reason.rstrip(".")
    return str(error).partition("\n")[0].rstrip(".")


def _fails_on_parts(size: int, error: MemfitError) -> str:
    return (
        f"the step fails on {size} samples of its batch ({_short(error)}), so the batch cannot be "
        "cut into such pieces."
    )


def _differs(size: int, place: str) -> str:
    return (
        f"the step does something else for a batch of {size} samples ({place}), so micro-batches "
        "would train something else; keep the batch whole."
    )
