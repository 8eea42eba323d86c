"""Finds out what a job's step changes, by recording two steps on fake tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.analysis.effects import GLOBAL_GENERATOR, Effect, EffectKind, Effects
from memfit.errors import JobFunctionError
from memfit.job import Job, Total
from memfit.live_state import Change, ChangeKind
from memfit.separation.draw_lines import DrawLines
from memfit.separation.recording_scope import watched
from memfit.separation.source_lines import lines_that_set
from memfit.separation.writes import Draw, Write, WriteNoter
from memfit.session.batches import BatchLayout, shapes_of
from memfit.session.borrowing import borrowed_to_record
from memfit.session.session import Session, open_session
from memfit.trace.events import Phase
from memfit.virtual.tensors import ValuesNeededError, as_virtual, virtual_tensors


def find_effects(job: Job, layout: BatchLayout, *, disguised: bool = True) -> Effects:
    """Find out what every step of a job changes besides gradients and what the optimizer keeps.

    Two steps are recorded on fake tensors, at two batch sizes, and the second is looked at. All
    that the job's code changes meanwhile is put back, so that asking changes nothing.

    Args:
        job: whose functions may build new objects, or give objects that are there already.
        layout: of its batches.
        disguised: whether fake tensors pass for tensors with values at first; not to be tried where
            that is known to fail.

    Raises:
        RecordingError: if the step needs the values of tensors, or an operator has no fake version.
        JobFunctionError: if one of the job's functions fails.
    """
    one = _seen_at(job, layout, job.batch_size, disguised=disguised)
    for size in _other_sizes(job.batch_size):
        with suppress(JobFunctionError):  # a loss over pairs takes no odd number of samples
            other = _seen_at(job, layout, size, disguised=disguised)
            return Effects(effects=tuple(_compared(one, other)), unseen=one.unseen)
    alone = (replace(effect, depends_on_batch=None) for effect in one.effects.values())
    return Effects(effects=tuple(alone), unseen=one.unseen)


@dataclass(slots=True)
class _Seen:
    """What one recorded step has changed."""

    effects: dict[tuple[str, str, EffectKind], Effect]
    evidence: dict[tuple[str, str, EffectKind], str | None]
    """What tells whether two steps changed a thing in the same way; None: nothing does."""
    unseen: tuple[str, ...] = ()

    def add(self, effect: Effect, evidence: str | None) -> None:
        """Add an effect; the first place is kept, evidence adds up."""
        key = (effect.owner, effect.name, effect.kind)
        known = self.effects.setdefault(key, effect)
        if not known.source_line and effect.source_line:
            self.effects[key] = replace(known, source_line=effect.source_line)
        if key in self.evidence and (evidence is None or self.evidence[key] is None):
            self.evidence[key] = None
        else:
            self.evidence[key] = f"{self.evidence.get(key) or ''}{evidence}" if evidence else None


def _other_sizes(num_samples: int) -> Iterator[int]:
    """Yield sizes to compare with, the one that shows most first."""
    yield num_samples - 1 if num_samples > 1 else 2
    if num_samples > 3:
        yield num_samples - 2
        yield num_samples // 2
    yield 2 * num_samples


def _seen_at(job: Job, layout: BatchLayout, batch_size: int, *, disguised: bool) -> _Seen:
    try:
        return _recorded(job, layout, batch_size, disguised=disguised)
    except ValuesNeededError:
        if not disguised:
            raise
        return _recorded(job, layout, batch_size, disguised=False)


def _recorded(job: Job, layout: BatchLayout, batch_size: int, *, disguised: bool) -> _Seen:
    shapes = shapes_of(job, batch_size)
    with (
        virtual_tensors(disguised=disguised) as mode,
        borrowed_to_record(job, mode) as borrowed_job,
    ):
        session = open_session(borrowed_job, "cpu", layout, _no_gradients)
        batch = as_virtual(mode, shapes)
        _step(session, batch, WriteNoter())
        # What is bound to what is looked at for parameters too; their content is fake.
        state = watched(session, job)
        stays, moves = state.found()
        noter = WriteNoter((*stays.generators, *moves.generators))
        optimizers = (*stays.optimizers, *moves.optimizers)
        noter.watch((*stays.tensors, *moves.tensors), _optimizers_own(session, optimizers))
        snapshot = state.snapshot()
        with noter:
            _step(session, batch, noter)
        changes = tuple(_that_count(snapshot.changes()))
        drawn = _lines_that_draw(session, batch, changes)
        functions = stays.functions
    seen = _Seen({}, {}, tuple(str(obstacle) for obstacle in state.obstacles))
    for write in noter.writes:
        seen.add(_effect_of_write(write), None)
    for draw in noter.draws:
        seen.add(_effect_of_draw(draw), f"{draw.num_elements},")
    for change in changes:
        found = drawn.get(change.owner) or lines_that_set(change.name, change.owner, functions)
        seen.add(_effect_of_change(change, found), change.evidence or None)
    return seen


def _no_gradients(*_: object) -> torch.Tensor:
    raise AssertionError("the step is run here")


def _step(session: Session, batch: Any, noter: WriteNoter) -> None:
    """Run one plain step."""
    session.optimizer.zero_grad(set_to_none=True)
    noter.phase = Phase.FORWARD
    loss = session.loss_of(batch)
    mean = loss.sum / loss.count if isinstance(loss, Total) else loss
    noter.phase = Phase.BACKWARD
    session.backward(mean)
    noter.phase = Phase.OPTIMIZER
    session.update(session)
    session.optimizer.zero_grad(set_to_none=True)


def _optimizers_own(
    session: Session, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """Yield what an optimizer, and those that it wraps, write in every update."""
    yield from session.model.parameters()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _that_count(changes: Iterable[Change]) -> Iterator[Change]:
    """Leave out generators whose draws are seen as operators are, and optimizers' own counts."""
    for change in changes:
        is_count = change.full_name.startswith("optimizer.state[") and _STEP.fullmatch(
            change.detail
        )
        if (change.owner, change.kind) != _TORCH_DRAWS and not is_count:
            yield change


def _lines_that_draw(session: Session, batch: Any, changes: Iterable[Change]) -> Mapping[str, str]:
    """Return for each library the line that draws from its generator, by one more step."""
    if not any(_is_global_draw(change) for change in changes):
        return {}
    lines = DrawLines()
    with lines.noted():
        _step(session, batch, WriteNoter())
    return lines.found


def _is_global_draw(change: Change) -> bool:
    return change.kind is ChangeKind.GENERATOR and not change.name


_STEP = re.compile(r"'step' was \d+, is \d+")
"""Of SparseAdam; others count in a tensor."""
_TORCH_DRAWS = ("torch", ChangeKind.GENERATOR)


def _effect_of_write(write: Write) -> Effect:
    place = write.place
    return Effect(
        owner=place.owner, name=place.name, kind=EffectKind.TENSOR, source_line=write.source_line
    )


def _effect_of_draw(draw: Draw) -> Effect:
    owner, name = ("torch", GLOBAL_GENERATOR) if draw.place is None else draw.place
    return Effect(owner=owner, name=name, kind=EffectKind.GENERATOR, source_line=draw.source_line)


def _effect_of_change(change: Change, source_line: str) -> Effect:
    kind = EffectKind(change.kind.value)
    return Effect(
        owner=change.owner,
        name=GLOBAL_GENERATOR if _is_global_draw(change) else change.name,
        kind=kind,
        source_line=source_line,
        detail=change.detail,
    )


def _compared(one: _Seen, other: _Seen) -> Iterator[Effect]:
    """Yield the effects, with whether they differ between two batch sizes."""
    for key, effect in {**other.effects, **one.effects}.items():
        if key not in one.effects or key not in other.effects:
            yield replace(effect, depends_on_batch=True)
            continue
        told = one.evidence[key], other.evidence[key]
        depends = None if None in told else told[0] != told[1]
        yield replace(effect, depends_on_batch=depends)
