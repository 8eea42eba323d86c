"""Computes directly, in fp64, what cutting a case's batch and recomputing its blocks change.

Nothing of memfit's strategies takes part: pieces are cut here, run here and compared here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from exactness.case import Adds, Case, Draws
from exactness.draws import (
    Record,
    Replay,
    Tape,
    doubles,
    global_states,
    put_back,
    seed_all,
    states_of,
)
from exactness.state import State, difference, state_of
from memfit import Job, Total

EQUAL_BELOW = 1e-9
"""Relative errors of gradients up to this are rounding; those beyond ``WRONG_ABOVE`` are not."""
WRONG_ABOVE = 1e-7

_STILLINGS = ("sample", "view", "once", "each", "sample, each")
"""Ways to hold draws still: pieces draw from torch what the whole batch drew for their samples, or
for views that lie behind each other; all begin with one seed; each piece begins with that seed."""


class UnclearError(Exception):
    """Tells that an error lies between rounding and a wrong result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One way to run a step in pieces, against the step in one piece."""

    counts: tuple[int, ...]
    weights: Literal["shares", "ones"]
    stilling: str = ""
    """How draws were held still; empty where nothing is drawn."""
    gradient_error: float = math.inf
    """Relative error of the gradient as one vector."""
    worst_error: float = math.inf
    """The largest relative error of one parameter's gradient."""
    loss_error: float = math.inf
    parameter_error: float = math.inf
    """The largest relative error of a trained parameter after the optimizer's step."""
    state_error: float = math.inf
    """The largest relative error of anything else that is left; infinite for another word."""
    num_shared_draws: int = 0
    failure: str = ""

    @property
    def agrees(self) -> bool:
        """Return whether the gradients are equal up to rounding.

        Raises:
            UnclearError: if they are neither equal nor clearly different.
        """
        if EQUAL_BELOW < self.worst_error < WRONG_ABOVE:
            raise UnclearError(str(self))
        return self.worst_error <= EQUAL_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is true of a case."""

    adds: Adds
    draws: Draws
    effects: bool
    leaves_same: bool
    """Whether accumulation in equal pieces leaves what the step in one piece leaves."""
    recompute_unsafe: bool
    reads_values: bool
    """Whether forward asked what is in a tensor, so that fake tensors cannot run it."""
    recompute_error: float
    cuts: tuple[Cut, ...]


@dataclass(slots=True)
class Step:
    """A job built anew, ready for its first step."""

    job: Job
    model: nn.Module
    batch: Any
    cuts: tuple[int | None, ...]

    def state(self) -> State:
        """Copy what can be reached from the step."""
        return state_of(self.model, self.job.loss, self.batch)


@dataclass(frozen=True, slots=True)
class _End:
    """What a step left."""

    gradients: list[Tensor]
    loss: float
    state: State


def truth_of(case: Case) -> Truth:
    """Compute what is true of a case.

    Raises:
        UnclearError: if a difference is neither rounding nor clearly more.
    """
    with warnings.catch_warnings(), doubles():
        warnings.simplefilter("ignore")
        tape = Tape()
        plain, has_drawn, effects = _plain(case, tape)
        cuts, adds = _adds(case, plain, tape, has_drawn)
        recompute_error, recompute_state = _recompute_errors(case, plain)
        return Truth(
            adds=adds,
            draws=_draws(cuts, has_drawn),
            effects=effects,
            leaves_same=cuts[0].state_error <= EQUAL_BELOW,
            recompute_unsafe=max(recompute_error, recompute_state) > WRONG_ABOVE,
            reads_values=tape.reads_values,
            recompute_error=recompute_error,
            cuts=tuple(cuts),
        )


def piece_counts(batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Return four equal pieces, and uneven ones that begin with three samples."""
    rest = batch_size - 3
    return (batch_size // 4,) * 4, (3, rest // 2, rest - rest // 2)


def _draws(cuts: Sequence[Cut], has_drawn: bool) -> Draws:
    if not has_drawn:
        return "none"
    found = next((cut for cut in cuts if cut.worst_error <= EQUAL_BELOW), cuts[0])
    is_shared = found.num_shared_draws or "each" in found.stilling or found.failure
    return "shared" if is_shared else "per-sample"


def _plain(case: Case, tape: Tape) -> tuple[_End, bool, bool]:
    """Run the step in one piece; say whether it draws, and whether it changes anything."""
    step = build_step(case)
    before = step.state()
    own = [repr(each) for each in states_of(before.sources)]
    seed_all()
    everywhere = global_states()
    with Record(tape):
        loss = _value(step.job.loss(step.model, step.batch), 1.0)
        loss.backward()
    has_drawn = everywhere != global_states() or bool(tape.tensors)
    has_drawn = has_drawn or own != [repr(each) for each in states_of(before.sources)]
    effects = max(difference(before, step.state())) > 0.0
    return _finish(step, float(loss.detach())), has_drawn, effects


def _value(loss: Tensor | Total, weight: float) -> Tensor:
    """Return the scalar that is differentiated."""
    return loss.sum / loss.count if isinstance(loss, Total) else loss * weight


def _finish(step: Step, loss: float) -> _End:
    parameters = [each for each in step.model.parameters() if each.requires_grad]
    gradients = [
        torch.zeros_like(each) if each.grad is None else each.grad.detach().clone()
        for each in parameters
    ]
    step.job.optimizer(parameters).step()
    return _End(gradients, loss, step.state())


def build_step(case: Case) -> Step:
    """Build a case's model and batch, the same each time."""
    job = case.build()
    seed_all()
    model = job.model().double()
    seed_all()
    batch, other = job.batch(job.batch_size), job.batch(job.batch_size - 1)
    batch = as_doubles(batch)
    return Step(job, model, batch, _dims(batch, other, job.batch_size))


def as_doubles(batch: Any) -> Any:
    """Return a batch whose floating-point tensors are in fp64."""
    return tree_map(_as_double, batch)


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _dims(batch: Any, other: Any, batch_size: int) -> tuple[int | None, ...]:
    """Find the dimension of each tensor that counts samples: it follows the batch size."""
    leaves, others = tree_flatten(batch)[0], tree_flatten(other)[0]
    return tuple(_dim(a, b, batch_size) for a, b in zip(leaves, others, strict=True))


def _dim(leaf: Any, other: Any, batch_size: int) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    for dim, (extent, less) in enumerate(zip(leaf.shape, other.shape, strict=True)):
        if extent != less and extent * (batch_size - 1) == less * batch_size:
            return dim
    return None


def _piece(step: Step, samples: range) -> Any:
    leaves, spec = tree_flatten(step.batch)
    return tree_unflatten(
        [
            leaf if dim is None else _narrow(leaf, dim, samples, step.job.batch_size)
            for leaf, dim in zip(leaves, step.cuts, strict=True)
        ],
        spec,
    )


def _narrow(leaf: Tensor, dim: int, samples: range, batch_size: int) -> Tensor:
    times = leaf.shape[dim] // batch_size
    return leaf.narrow(dim, samples.start * times, len(samples) * times)


def _adds(case: Case, plain: _End, tape: Tape, has_drawn: bool) -> tuple[list[Cut], Adds]:
    """Find how gradients add up, from four equal pieces and uneven ones."""
    batch_size = case.build().batch_size
    equal, uneven = piece_counts(batch_size)
    best = partial(_best, case, plain, tape, has_drawn)
    cuts = [best(Cut(counts=counts, weights="shares")) for counts in (equal, uneven)]
    if cuts[0].agrees and cuts[1].agrees:
        return cuts, "mean"
    if cuts[0].agrees:
        return cuts, "groups"
    if cuts[0].failure:
        return cuts, "no"
    cuts += [best(Cut(counts=counts, weights="ones")) for counts in (equal, uneven)]
    return cuts, "sum" if cuts[2].agrees and cuts[3].agrees else "no"


def _best(case: Case, plain: _End, tape: Tape, has_drawn: bool, cut: Cut) -> Cut:
    """Run a step in pieces; where something is drawn, with each way to hold draws still."""
    stillings: tuple[str, ...] = _STILLINGS if has_drawn else ("",)
    found = []
    for stilling in stillings:
        found.append(_cut(case, plain, tape, replace(cut, stilling=stilling)))
        if found[-1].worst_error <= EQUAL_BELOW:
            break
    return min(found, key=lambda each: each.worst_error)


def _cut(case: Case, plain: _End, tape: Tape, cut: Cut) -> Cut:
    step = build_step(case)
    sources = step.state().sources if "each" in cut.stilling else []
    seed_all()
    try:
        loss, num_shared = _pieces(step, tape, cut, sources)
        end = _finish(step, loss)
    except Exception as error:  # noqa: BLE001  # whatever a loss does to a piece is the finding
        return replace(cut, failure=f"{type(error).__name__}: {str(error)[:160]}")
    whole, worst = gradient_errors(plain.gradients, end.gradients)
    parameter_error, state_error = difference(plain.state, end.state)
    return replace(
        cut,
        gradient_error=whole,
        worst_error=worst,
        loss_error=abs(end.loss - plain.loss) / max(abs(plain.loss), 1e-12),
        parameter_error=parameter_error,
        state_error=state_error,
        num_shared_draws=num_shared,
    )


def _pieces(step: Step, tape: Tape, cut: Cut, sources: list[Any]) -> tuple[float, int]:
    """Run forward and backward of each piece; return the loss and how many draws were shared."""
    own = states_of(sources)
    start, total, count, num_shared = 0, 0.0, 0.0, 0
    for length in cut.counts:
        samples = range(start, start + length)
        start += length
        if "each" in cut.stilling:
            seed_all()
            put_back(sources, own)
        with ExitStack() as stack:
            replay = Replay(tape, samples, step.job.batch_size, _layout(cut.stilling))
            if cut.stilling not in ("", "once", "each"):
                stack.enter_context(replay)
            loss = step.job.loss(step.model, _piece(step, samples))
            share = length / step.job.batch_size if cut.weights == "shares" else 1.0
            part = loss.sum if isinstance(loss, Total) else loss * share
            part.backward()
        count += float(loss.count) if isinstance(loss, Total) else 0.0
        total += float(part.detach())
        num_shared = replay.num_shared
    if isinstance(loss, Total):
        _divide_gradients(step.model, count)
        total /= count
    return total, num_shared


def _layout(stilling: str) -> Literal["sample", "view"]:
    return "view" if stilling == "view" else "sample"


def _divide_gradients(model: nn.Module, count: float) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad /= count


def gradient_errors(expected: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Return the relative error of gradients as one vector, and of the worst parameter.

    A parameter whose gradient is below a millionth of the whole is measured against that, since
    some are zero but for rounding, such as that of a bias in front of a BatchNorm.
    """
    norm = math.sqrt(sum(float(each.square().sum()) for each in expected))
    gaps = [float((a - b).norm()) for a, b in zip(expected, got, strict=True)]
    floor = max(1e-6 * norm, 1e-12)
    worst = max(gap / max(float(a.norm()), floor) for gap, a in zip(gaps, expected, strict=True))
    whole = math.sqrt(sum(gap * gap for gap in gaps)) / max(norm, 1e-12)
    if not math.isfinite(whole):
        return math.inf, math.inf
    return whole, worst


def _recompute_errors(case: Case, plain: _End) -> tuple[float, float]:
    """Run each block's forward twice, as checkpointing does; return the errors.

    Both are infinite if the step fails.
    """
    step = build_step(case)
    seed_all()
    try:
        with _recomputed(blocks_of(case, step.model)):
            loss = _value(step.job.loss(step.model, step.batch), 1.0)
            loss.backward()
        end = _finish(step, float(loss.detach()))
    except Exception:  # noqa: BLE001  # a step that checkpointing breaks is a finding
        return math.inf, math.inf
    _, worst = gradient_errors(plain.gradients, end.gradients)
    return worst, max(difference(plain.state, end.state))


def blocks_of(case: Case, model: nn.Module) -> list[nn.Module]:
    """Return the modules that are recomputed: a case's blocks, or the model's children."""
    if case.blocks:
        return list(model.get_submodule(case.blocks).children())
    found = []
    for child in model.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += list(child.children()) if is_list else [child]
    return found


@contextmanager
def _recomputed(blocks: list[nn.Module]) -> Iterator[None]:
    """Run the forward of blocks under checkpointing meanwhile."""
    for block in blocks:
        forward = partial(checkpoint, block.forward, use_reentrant=False, early_stop=False)
        block.__dict__["forward"] = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]
