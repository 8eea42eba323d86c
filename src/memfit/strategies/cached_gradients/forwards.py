"""Stands in for the forward of a module whose rows are run piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from memfit.errors import StrategyError
from memfit.forward_state import Before, ForwardState, Left
from memfit.strategies.cached_gradients.rows import (
    CannotCutError,
    ResultForm,
    RowDims,
    RowsMixedError,
    find_rows,
)
from memfit.strategies.cached_gradients.separation_check import checked_form
from memfit.strategies.cached_gradients.structures import Structure, taken_apart
from memfit.trace.abridgement import left_out

NAME = "cached-gradients"


@dataclass(slots=True)
class StepInProgress:
    """What all forwards of a model share while a step is run."""

    micro_batch_size: int
    kept_pieces: int = 0
    """How many pieces of a call, the last ones, keep what backward needs."""
    batch_size: int | None = None
    """Samples of the batch; None outside a step."""
    row_dims: Mapping[int, int | None] = field(default_factory=dict)
    """The dimension of rows of the batch's tensors, by ``id``."""
    is_inside: bool = False
    """Whether a piece is being run, whose modules are called as they are."""
    num_cut: int = 0
    """Calls of this step that were run in pieces."""
    num_small: int = 0
    """Calls that had no more rows than a piece."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why modules were left as they are, by name."""

    def begin(self, batch_size: int, row_dims: Mapping[int, int | None]) -> None:
        """Begin a step on a batch."""
        self.batch_size, self.row_dims = batch_size, row_dims
        self.num_cut = self.num_small = 0
        self.reasons.clear()

    def end(self) -> None:
        """End a step, however it went."""
        self.batch_size, self.row_dims = None, {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a piece."""
        before, self.is_inside = self.is_inside, True
        cached = torch.is_autocast_cache_enabled()
        # A weight that was cast for one piece would gather the gradients of all in 16 bits.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            self.is_inside = before
            torch.set_autocast_cache_enabled(cached)


class PiecewiseForward:
    """Stand in for the forward of a module.

    The rows of a call are run in pieces. Of each piece only its arguments and results are kept, but
    for the last ones where the step keeps some. Backward comes to the pieces one after the other,
    the last one first, and runs each again from the same random states before it goes through it.
    Autograd adds up what the pieces give to a parameter, and hands it over once, when all of it is
    there.

    Args:
        name: of the module in the model.
        module: whose forward.
        step: what all forwards share.
        is_named: whether the user chose the module, so that what cannot be cut is an error.
        keeps_rows_apart: whether it is known to do so, whatever a few rows show; results without
            rows then belong to none.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        step: StepInProgress,
        *,
        is_named: bool,
        keeps_rows_apart: bool,
    ) -> None:
        self.name = name or "the model"
        self._module = module
        self._forward = module.forward
        self._step = step
        self._is_named = is_named
        self._needs_rows_everywhere = not (is_named or keeps_rows_apart)
        self._forms: dict[Any, ResultForm | str] = {}

    @cached_property
    def _state(self) -> ForwardState:
        """Watch what the module can change; only of modules that are cut, as it takes a walk."""
        return ForwardState({self.name: self._module}, NAME)

    @property
    def step(self) -> StepInProgress:
        """Return what all forwards of the model share."""
        return self._step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Carry the call out in pieces, or as it is where there is nothing to cut."""
        step = self._step
        if step.batch_size is None or step.is_inside or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        leaves, structure = taken_apart((args, kwargs))
        if any(map(_is_stand_in, leaves)):
            return self._forward(*args, **kwargs)
        try:
            rows, form = self._judged(leaves, structure)
        except CannotCutError as reason:
            if self._is_named:
                raise StrategyError(NAME, self._refusal(reason)) from reason
            step.reasons.setdefault(self.name, str(reason))
            return self._forward(*args, **kwargs)
        if rows is None or form is None:
            return self._forward(*args, **kwargs)
        try:
            return self._in_pieces(leaves, structure, rows, form)
        except CannotCutError as reason:
            raise StrategyError(NAME, self._refusal(reason)) from reason

    def _judged(
        self, leaves: Sequence[Any], structure: Structure
    ) -> tuple[RowDims | None, ResultForm | None]:
        """Find the rows of a call and the form of its results; None where it is left as it is.

        Raises:
            CannotCutError: if it cannot be cut.
        """
        step = self._step
        assert step.batch_size is not None, "calls are judged inside steps"
        rows = find_rows(leaves, step.batch_size, step.row_dims)
        if rows is None or not self._wants_gradients(leaves):
            if self._is_named:
                step.reasons.setdefault(self.name, "no argument of it has rows of the batch")
            return None, None
        if rows.num_rows <= step.micro_batch_size:
            step.num_small += 1
            return None, None
        key = (repr(structure), rows.dims, tuple(map(_kind, leaves)), self._module.training)
        if key not in self._forms:
            self._forms[key] = self._form(leaves, structure, rows)
        form = self._forms[key]
        if isinstance(form, str):
            raise CannotCutError(form)
        return rows, form

    def _wants_gradients(self, leaves: Sequence[Any]) -> bool:
        parameters = self._module.parameters()
        return any(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)) or any(
            parameter.requires_grad for parameter in parameters
        )

    def _form(self, leaves: Sequence[Any], structure: Structure, rows: RowDims) -> ResultForm | str:
        """Find the form of results; the reason where there is none."""

        def call(some: Sequence[Any]) -> Any:
            with self._step.inside():
                args, kwargs = structure.filled(some)
                return self._forward(*args, **kwargs)

        def checked() -> ResultForm:
            return checked_form(
                call,
                leaves,
                rows,
                self._step.micro_batch_size,
                needs_rows_everywhere=self._needs_rows_everywhere,
            )

        if self._state.obstacle is not None:
            return f"pieces would run it several times, and {self._state.obstacle}".rstrip(".")
        if watched := _module_that_watches_gradients(self._module):
            return f"hooks of its {watched} would see the gradients of pieces"
        try:
            found: ResultForm = _carried_out_and_undone(self._state, leaves, checked)
            return found
        except RowsMixedError as reason:
            # Recorded on tensors without values, the same call is taken for one that can be cut.
            raise StrategyError(NAME, self._refusal(reason)) from reason
        except CannotCutError as reason:
            return str(reason)

    def _in_pieces(
        self, leaves: Sequence[Any], structure: Structure, rows: RowDims, form: ResultForm
    ) -> Any:
        effects = _CallEffects(self._state, leaves)
        size = self._step.micro_batch_size
        num_pieces = -(-rows.num_rows // size)
        # Backward comes to the last ones first: what they keep is gone before a piece runs again.
        first_kept = max(0, num_pieces - self._step.kept_pieces)
        skipped = left_out(first_kept) if _has_fake(leaves) else range(0)
        results: list[Any] = []
        kept: list[torch.Tensor] = []
        for number, piece in enumerate(rows.pieces(leaves, size)):
            if number in skipped:
                results.append(form.like(results[0]))
                kept.append(torch.get_rng_state())  # as it is kept with every piece
            elif number >= first_kept:
                results.append(self._kept(piece, structure, effects))
            else:
                results.append(self._checkpointed(piece, structure, effects, kept))
        self._step.num_cut += 1
        return form.joined(results)

    def _kept(self, piece: Sequence[Any], structure: Structure, effects: _CallEffects) -> Any:
        """Run a piece that keeps what backward needs."""

        def run(_: Before) -> Any:
            args, kwargs = structure.filled(piece)
            with self._step.inside():
                return self._forward(*args, **kwargs)

        return effects.piece(run)

    def _checkpointed(
        self,
        piece: Sequence[Any],
        structure: Structure,
        effects: _CallEffects,
        kept: list[torch.Tensor],
    ) -> Any:
        """Run a piece that keeps nothing but its arguments, and what else is to be kept."""
        places = [place for place, leaf in enumerate(piece) if isinstance(leaf, torch.Tensor)]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in piece]

        def run(*tensors: torch.Tensor, _: Any = kept) -> Any:
            filled = list(others)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = structure.filled(filled)
            return self._forward(*args, **kwargs)

        def checkpointed(before: Before) -> Any:
            return checkpoint(
                run,
                *(piece[place] for place in places),
                use_reentrant=False,
                preserve_rng_state=True,
                context_fn=partial(self._contexts, before),
            )

        return effects.piece(checkpointed)

    def _contexts(
        self, before: Before
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a piece in forward, and of the same piece in backward."""
        inside = self._step.inside
        return _Nested(inside), _Nested(inside, before.shown)

    def _refusal(self, reason: CannotCutError) -> str:
        return (
            f"{self.name} cannot be run in pieces of its rows: {reason}. Name modules that "
            "treat the samples of a batch separately, with representations: [...]."
        )


class _Nested:
    """Several contexts as one that may be entered again: backward may come more than once."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            self._entered.append(stack.pop_all())

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)


def _module_that_watches_gradients(module: torch.nn.Module) -> str:
    """Name a module inside another that has hooks on its gradients; empty if none has."""
    return next(
        (
            name
            for name, part in module.named_modules()
            if part is not module and (part._backward_hooks or part._backward_pre_hooks)
        ),
        "",
    )


def _is_stand_in(leaf: Any) -> bool:
    """Return whether the call is only followed, with other members in the module meanwhile.

    What is found out about the module then is not so later.
    """
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and leaf.is_meta


def _has_fake(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in leaves)


def _kind(leaf: Any) -> Any:
    """Describe a leaf of the arguments as far as the form of the results may depend on it."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


class _CallEffects:
    """The effects of one call: every piece starts from the same state, and one outcome is kept.

    That is what one call on all rows leaves, if the outcome does not depend on the rows (the power
    iteration of spectral norm, counters). Generators of random numbers move on from piece to piece.

    Args:
        state: of the module.
        arguments: of the call, which it may change as well.
    """

    def __init__(self, state: ForwardState, arguments: Sequence[Any]) -> None:
        self._state = state
        self._start = state.before(*arguments)
        self._left: Left | None = None
        self._has_run = False

    def piece(self, run: Callable[[Before], Any]) -> Any:
        """Run a piece; ``run`` is given what there is before it.

        Raises:
            CannotCutError: if it leaves something else than the pieces before it; then everything
                is as it was before the call.
        """
        before = self._start
        if self._has_run:
            self._start.put_back()
            before = self._start.with_generators_here()
        self._has_run = True
        result = self._state.run(self._start, lambda: run(before))
        if self._left is None:
            self._left = Left(self._start)
        elif name := self._left.first_difference():
            self._start.put_back()
            self._start.positions.put_back()
            raise CannotCutError(
                f"what it leaves in {name} depends on the rows, as with running statistics and "
                "codebooks, so pieces would leave something else"
            )
        return result


def _carried_out_and_undone(
    state: ForwardState, arguments: Sequence[Any], call: Callable[[], Any]
) -> Any:
    """Carry something out and put back what it changed, random generators included."""
    before = state.before(*arguments)
    try:
        return state.run(before, call)
    finally:
        before.put_back()
        before.positions.put_back()
