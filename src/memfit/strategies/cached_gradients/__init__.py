"""Cached gradients: the loss sees the whole batch, its representations are computed in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch.nn.utils.parametrize import ParametrizationList

from memfit.analysis.separability import Separability, not_known
from memfit.errors import StrategyError
from memfit.separation.separation import Separation
from memfit.session.block_names import expand_names, first_few
from memfit.session.forwards import replace_forward, without_generation_caches
from memfit.session.leaves import leaves_of
from memfit.session.session import GradientPass, PhaseListener, Session
from memfit.strategies.base import CUTS_BATCH, AbstractSplitting, Numerics, Seam, Undo
from memfit.strategies.cached_gradients.forwards import (
    NAME,
    PiecewiseForward,
    StepInProgress,
)
from memfit.strategies.facts import JobFacts, shared_facts
from memfit.trace.events import Phase


@dataclass(frozen=True, kw_only=True)
class CachedGradients(AbstractSplitting):
    """Compute representations piece by piece, and the loss on those of the whole batch.

    For losses that couple samples through what a network makes of each: contrastive losses,
    in-batch negatives, mining, statistics over the batch. The representations of the whole batch
    come first, without what backward needs; then the loss and its gradients on them; then the
    pieces once more, each with its part of those gradients. Random draws are replayed. Gradients
    are those of the whole batch for any loss.

    ``representations`` are names of modules, ``''`` the model itself; none at all means what is
    known to treat samples separately, or the outermost modules that the loss calls. Each call of
    such a module is cut along the rows of its arguments. In the first step it is checked on one
    piece that fewer rows at a time give the same. What a module changes besides its results happens
    once per call; where that depends on the rows, it is an error.

    The last ``kept_pieces`` of each call keep what backward needs and are not run again: time for
    the memory of those pieces.

    Limits: about one forward more, less the share of the kept pieces. Representations, and the loss
    on them, are those of the whole batch. Batch normalisation in training inside a representation
    is refused. Dropout masks are drawn per piece: same in law. In 16-bit parameters gradients add
    up in 16 bits.
    Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983, section 3; pieces are run
    again by torch.utils.checkpoint, https://docs.pytorch.org/docs/stable/checkpoint.html.
    """

    representations: tuple[str, ...] = ()
    kept_pieces: int = 0

    name: ClassVar[str] = NAME
    not_with_shards: ClassVar[str] = (
        "it runs parts of the model apart from its forward, where ranks exchange nothing, and a "
        "loss that couples samples needs those of the other ranks"
    )
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.WINDOW})
    never_faster: ClassVar[bool] = True
    keeps_batch_whole: ClassVar[bool] = True
    quiet_settings: ClassVar[frozenset[str]] = frozenset({"kept_pieces"})
    excludes: ClassVar[Mapping[str, str]] = {
        "micro-batching": CUTS_BATCH,
        "batchnorm-replay": CUTS_BATCH,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(0, "kept_pieces")

    def keeping(self, num_pieces: int) -> Self:
        """Return it with some pieces kept instead of run again."""
        return replace(self, kept_pieces=num_pieces)

    def with_size(self, micro_batch_size: int) -> Self:
        """Return it with pieces of another size, of which one at most is not run again."""
        kept = min(self.kept_pieces, 1)
        return replace(self, micro_batch_size=micro_batch_size, kept_pieces=kept)

    def unsuited(self, facts: JobFacts) -> str | None:
        """Refuse names that are not there, that lie inside each other, or that normalise rows."""
        if not self.representations:
            return None  # what is found by itself is judged when it is asked for
        try:
            names = expand_names(self.representations, ("", *facts.module_names))
        except ValueError as error:
            return f"{error}."
        for outer, inner in pairwise(sorted(names, key=lambda name: name.split("."))):
            if inner.startswith(f"{outer}.") or not outer:
                return f"{inner} lies inside {outer or 'the model'}; name one of the two."
        return _normalisation_inside(tuple(names), facts)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse rows that meet in a representation, and models in which none can be found."""
        reason = super().obstacle(facts)
        if reason is None and chosen_representations(self.representations, facts) is None:
            return _normalisation_inside(None, facts)
        return reason

    def separability(self, separation: Separation | None) -> Separability:
        """Return whether rows stay apart in the representations; the loss may mix them."""
        if separation is None:
            return not_known("whether rows stay apart in the representations was not looked into.")
        if (settled := separation.settled.get(self._pieces())) is not None:
            return settled
        names = self.representations or separation.representations()
        if not names:
            return not_known("no module could be shown to keep apart the rows of its arguments.")
        found = [_told_of_rows(name, separation.of_rows(name)) for name in names]
        worst = next((each for each in found if not each.is_proved), found[0])
        return replace(worst, draws=any(each.draws for each in found))

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Pieces draw other random numbers; the loss, which is computed once, draws the same."""
        return super().numerics_for(replace(facts, draws_random=None))

    def settle(self, separation: Separation | None, found: Separability) -> None:
        """Keep what a trial has shown, whatever pieces are kept instead of run again."""
        if separation is not None:
            separation.settled[self._pieces()] = found

    def _pieces(self) -> tuple[object, ...]:
        return self.micro_batch_size, self.representations

    def apply(self, session: Session) -> Undo:
        """Put piecewise forwards in place of those of the representations.

        Where that has been done already, their pieces have another size until it is undone.
        """
        facts = shared_facts(session)
        if reason := self.obstacle(facts):
            raise StrategyError(self.name, reason)
        before = session.gradient_pass
        with ExitStack() as undos:
            step = _step_in_place(session.model)
            if step is None:
                undos.enter_context(without_generation_caches(session.model))
                step = StepInProgress(self.micro_batch_size, self.kept_pieces)
                for module, forward in self._forwards(session.model, facts, step):
                    undos.callback(replace_forward(module, forward))
            else:
                for name in ("micro_batch_size", "kept_pieces"):
                    undos.callback(setattr, step, name, getattr(step, name))
                    setattr(step, name, getattr(self, name))
            undos.callback(setattr, session, "gradient_pass", before)
            session.gradient_pass = partial(_pass_on_whole_batch, step, before)
            return undos.pop_all().close

    def _forwards(
        self, model: torch.nn.Module, facts: JobFacts, step: StepInProgress
    ) -> Iterator[tuple[torch.nn.Module, PiecewiseForward]]:
        """Yield modules with the forwards that take the place of theirs.

        Where the user has named none, what lies inside a representation gets one as well: it takes
        over where the calls of the representation itself cannot be cut.
        """
        chosen = chosen_representations(self.representations, facts)
        is_named = bool(self.representations)
        modules = list(_modules(model, chosen, with_parts=not is_named))
        tops = set() if chosen is None else {id(model.get_submodule(name)) for name in chosen}
        for name, module in modules:
            yield (
                module,
                PiecewiseForward(
                    name, module, step, is_named=is_named, keeps_rows_apart=id(module) in tops
                ),
            )


def chosen_representations(named: tuple[str, ...], facts: JobFacts) -> tuple[str, ...] | None:
    """Return the modules to cut: those that are named, else those that are known; None for neither.

    Where neither is known, the outermost modules are taken whose calls can be cut.

    Raises:
        ValueError: if the model has no such module.
    """
    if not named:
        found = facts.separation.representations() if facts.separation is not None else ()
        return found or None
    return tuple(expand_names(named, ("", *facts.module_names)))


def _normalisation_inside(names: tuple[str, ...] | None, facts: JobFacts) -> str | None:
    """Return which batch normalisation would take its statistics over pieces."""
    inside = [
        norm
        for norm in facts.batch_norms
        if names is None or any(not n or norm == n or norm.startswith(f"{n}.") for n in names)
    ]
    if not inside:
        return None
    return (
        f"batch normalisation takes its statistics over the whole batch ({first_few(inside)}), so "
        "a piece of the rows would be normalised differently. Freeze it with .eval(), or "
        "name representations without it."
    )


def _told_of_rows(name: str, found: Separability) -> Separability:
    """Say of a module, not of the loss, what was found of its rows."""
    if found.is_proved:
        return found
    module = name or "the model"
    if found.is_refuted:
        culprit = found.culprit
        reason = _NUMBER_OF_ROWS if culprit is None else culprit.place()
        return replace(
            found, sentence=f"{module} mixes rows of the batch: {reason}. {_NAME_OTHERS}"
        )
    reason = found.sentence.rstrip(".")
    return replace(found, sentence=f"{module} may mix rows of the batch: {reason}.")


def _step_in_place(model: torch.nn.Module) -> StepInProgress | None:
    """Return what piecewise forwards share that are in place already; None without any."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((each.step for each in forwards if isinstance(each, PiecewiseForward)), None)


def _modules(
    model: torch.nn.Module, names: tuple[str, ...] | None, *, with_parts: bool
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules whose forward is replaced, each once: those named, or all."""
    chosen = ("",) if names is None else names
    met: set[int] = set()
    computing_weights = {
        id(part)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for part in module.modules()
    }
    for top in chosen:
        for inner, module in model.get_submodule(top).named_modules():
            is_top = not inner and names is not None
            if id(module) in met or not (
                is_top or (with_parts and _may_be_cut(module, computing_weights))
            ):
                continue
            met.add(id(module))
            yield ".".join(filter(None, (top, inner))), module


def _may_be_cut(module: torch.nn.Module, computing_weights: set[int]) -> bool:
    has_parameters = any(True for _ in module.parameters())
    is_left = id(module) in computing_weights or isinstance(module, torch.jit.ScriptModule)
    return has_parameters and not is_left


def _pass_on_whole_batch(
    step: StepInProgress,
    gradient_pass: GradientPass,
    session: Session,
    batch: Any,
    enter_phase: PhaseListener,
) -> torch.Tensor:
    """Compute the gradients of the loss on a whole batch, while calls are cut."""

    def entered(phase: Any) -> None:
        if phase is Phase.BACKWARD:
            _check_something_was_cut(step)
        enter_phase(phase)

    size = session.micro_batch_size
    num_samples = session.layout.num_samples(batch)
    session.micro_batch_size = max(size, num_samples)
    step.begin(num_samples, _row_dims(session, batch))
    try:
        return gradient_pass(session, batch, entered)
    finally:
        step.end()
        session.micro_batch_size = size


def _row_dims(session: Session, batch: Any) -> Mapping[int, int | None]:
    """Tell where the batch's own tensors have their rows."""
    places = zip(leaves_of(batch), session.layout.dims, strict=True)
    return {
        id(leaf): None if place is None else place.dim
        for leaf, place in places
        if isinstance(leaf, torch.Tensor)
    }


def _check_something_was_cut(step: StepInProgress) -> None:
    """Refuse a step in which no call was cut, though the batch is larger than a piece.

    Raises:
        StrategyError: if there was none, with what stood in the way.
    """
    if step.num_cut or step.num_small or (step.batch_size or 0) <= step.micro_batch_size:
        return
    reasons = [f"{name}: {reason}" for name, reason in step.reasons.items()]
    found = "; ".join(reasons[:3]) or "none was called with gradients on rows of the batch"
    raise StrategyError(
        NAME,
        f"no call of a module could be run in pieces ({found}). Name modules that the loss "
        "calls and that treat the samples of a batch separately, with representations: [...].",
    )


_NUMBER_OF_ROWS = "what it makes of a row depends on how many there are"
_NAME_OTHERS = (
    "Name modules that treat the samples of a batch separately, with representations: [...]."
)
