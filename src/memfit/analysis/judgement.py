"""Judges a followed step: are its loss a mean and its gradients sums over the samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from memfit.analysis.effects import EffectKind, Effects
from memfit.analysis.flow import Flow, Kind, Problem, is_one, same_ratio
from memfit.analysis.separability import (
    Outcome,
    Separability,
    not_known,
    refuted,
)
from memfit.analysis.use import Sizes
from memfit.analysis.walk import Followed, Write


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where the results of a step lie in its recording, by the tensors' numbers."""

    loss: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    is_total: bool = False
    count: int | float | None = None
    """Of a Total: a tensor's number, or a float that is the count itself."""

    def numbers(self) -> tuple[int, ...]:
        """List the tensors at the ends."""
        counts = (self.count,) if isinstance(self.count, int) else ()
        return (self.loss, *self.gradients.values(), *counts)


def judge(followed: Followed, ends: Ends, others: Ends, sizes: Sizes) -> Separability:
    """Return whether the gradients of pieces add up to those of the batch.

    Args:
        followed: what is known of the step's tensors.
        ends: where its results lie, at the first size.
        others: the same at the second size.
        sizes: the batch sizes.
    """
    for found in (
        _judged_loss(followed, ends, sizes),
        _judged_count(followed, ends, others, sizes),
        _judged_gradients(followed, ends, sizes),
        _judged_writes(followed),
    ):
        if found is not None:
            return found
    return Separability(
        outcome=Outcome.PROVED,
        draws=followed.draws,
        conditions=tuple(followed.conditions),
        tried=tuple(followed.tried),
    )


def judge_effects(
    found: Separability,
    effects: Effects,
    bound: Mapping[str, Flow],
    unread: Collection[str] = (),
) -> Separability:
    """Return whether pieces still keep the results, given what else the step changes.

    What operators write is not judged here; see ``judge``. Random draws of torch are followed as
    operators.

    Args:
        found: that loss and gradients add up.
        effects: what the step changes.
        bound: what is known of tensors that names have been set to.
        unread: those of these names that no step reads before it has set them itself.
    """
    worst = found
    overwritten = []
    for effect in effects.writes:
        flow = bound.get(effect.full_name)
        is_free = flow is not None and flow.kind is Kind.FREE and flow.is_plain
        if effect.kind is EffectKind.TENSOR and effect.detail:  # seen by its form, not by operators
            worst = not_known(_COUNTER.format(effect.sentence().rstrip(".")))
            continue
        if effect.kind is EffectKind.TENSOR or (is_free and effect.kind is EffectKind.BINDING):
            continue
        if effect.kind is EffectKind.BINDING and effect.full_name in unread:
            overwritten.append(effect.full_name)
            continue
        if effect.depends_on_batch is not False:
            return refuted(_EFFECT.format(effect.sentence().rstrip(".")))
        worst = not_known(_COUNTER.format(effect.sentence().rstrip(".")))
    for effect in effects.draws:
        if effect.detail:  # seen by its state, not as an operator of torch
            where = f" ({effect.source_line})" if effect.source_line else ""
            worst = not_known(_DRAW.format(effect.full_name, where))
    return replace(worst, overwritten=tuple(overwritten)) if worst.is_proved else worst


def _judged_loss(followed: Followed, ends: Ends, sizes: Sizes) -> Separability | None:
    flow = followed.flows[ends.loss]
    if flow.problem is not None:
        return _bad(flow, flow.problem, "the loss")
    assert not flow.is_bad, "what is bad says why"
    if flow.kind in (Kind.EACH, Kind.ONE):
        return not_known("the loss belongs to one sample, so the batch has none to spare.")
    if ends.is_total:
        is_sum = _as_sum(flow, sizes) and same_ratio(_as_sum(flow, sizes), 1.0)
        return None if is_sum else refuted(_TOTAL.format("sum"))
    ratio = _as_sum(flow, sizes)
    if same_ratio(ratio, sizes.shrink):
        return None
    return refuted(_SUM if is_one(ratio) else _SCALED)


def _as_sum(flow: Flow, sizes: Sizes) -> float:
    """Return the ratio of a tensor taken for a sum over the samples."""
    return flow.ratio * (sizes.shrink if flow.kind is Kind.FREE else 1.0)


def _judged_count(
    followed: Followed, ends: Ends, others: Ends, sizes: Sizes
) -> Separability | None:
    if not ends.is_total:
        return None
    if isinstance(ends.count, float):
        ratio = _ratio_of_counts(ends, others) * sizes.shrink
        return None if same_ratio(ratio, 1.0) else refuted(_TOTAL.format("count"))
    assert ends.count is not None
    flow = followed.flows[ends.count]
    if flow.problem is not None:
        return _bad(flow, flow.problem, "the count of the loss")
    if flow.kind in (Kind.EACH, Kind.ONE) or not same_ratio(_as_sum(flow, sizes), 1.0):
        return refuted(_TOTAL.format("count"))
    return None


def _ratio_of_counts(ends: Ends, others: Ends) -> float:
    if not isinstance(ends.count, float) or not isinstance(others.count, float) or not ends.count:
        return 0.0
    return others.count / ends.count


def _judged_gradients(followed: Followed, ends: Ends, sizes: Sizes) -> Separability | None:
    worst: Separability | None = None
    for name, number in ends.gradients.items():
        flow = followed.flows[number]
        if flow.problem is not None:
            found = _bad(flow, flow.problem, f"the gradient of {name}")
        elif flow.is_zero:
            continue
        elif flow.kind in (Kind.EACH, Kind.ONE):
            found = not_known(f"the gradient of {name} has a dimension that counts samples.")
        elif same_ratio(_as_sum(flow, sizes), 1.0):
            continue
        else:
            found = refuted(_GRADIENT.format(name))
        if found.is_refuted:
            return found
        worst = worst or found
    return worst


def _judged_writes(followed: Followed) -> Separability | None:
    for write in followed.writes:
        if write.flow.kind is Kind.FREE and write.flow.is_plain and not write.flow.is_drawn:
            continue
        if write.flow.kind is Kind.UNKNOWN:
            return not_known(_WRITE.format(write.culprit.place()), write.culprit)
        return refuted(_write_sentence(write), write.culprit)
    return None


def _write_sentence(write: Write) -> str:
    return _WRITE.format(write.culprit.place())


def _bad(flow: Flow, problem: Problem, what: str) -> Separability:
    place = problem.culprit.place()
    if flow.kind is Kind.UNKNOWN:
        return not_known(_UNKNOWN.format(what, place, problem.sentence), problem.culprit)
    return refuted(_COUPLED.format(what, place, problem.sentence), problem.culprit)


_EFFECT = (
    "{}, in a way that depends on the batch or may do so; in pieces it would be changed several "
    "times, each by one piece."
)
_COUNTER = "{}, so that later steps may do something else than the one that was followed."
_DRAW = "{} is drawn from{}; what is drawn outside torch's operators cannot be followed."
_COUPLED = (
    "{} couples the samples of a batch: {} {}. Micro-batches would train something else. If "
    "samples are apart up to their representations, the exact way is cached-gradients (`memfit "
    "plan --require cached-gradients`), with the loss on the whole batch; "
    "`memfit.losses.contrastive_loss` streams such a loss."
)
_UNKNOWN = "{} could not be followed: {} {}."
_SUM = (
    "the loss is a sum over samples, not their mean; divide it by the number of samples, and "
    "multiply the learning rate by it."
)
_SCALED = (
    "the loss changes with the batch size in another way than a mean over samples does; divide it "
    "by the number of samples."
)
_TOTAL = (
    "the {} of the loss's memfit.Total does not add up over samples; a term that belongs to no "
    "sample has to be multiplied by the count."
)
_GRADIENT = "the gradient of {} does not add up over samples: it changes with the batch size."
_WRITE = (
    "the step writes what depends on the batch into a tensor that outlives it ({}); in pieces it "
    "would be written several times, each from one piece."
)
