"""Runs blocks of a model again in backward, instead of keeping what their forward makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit.errors import StrategyError
from memfit.forward_state import Before, ForwardState
from memfit.session.forwards import replace_forward
from memfit.strategies.base import Undo
from memfit.trace.operators import draws, operator_name


def is_recomputed(block: torch.nn.Module) -> bool:
    """Return whether the forward of a block is recomputed by ``recompute_block``."""
    own = vars(block).get("forward")
    return isinstance(own, partial) and own.func is _run_checkpointed


def recompute_block(
    block: torch.nn.Module, name: str, strategy: str, *, keep: frozenset[str] = frozenset()
) -> Undo:
    """Have a block's forward recomputed in backward; return what undoes it.

    Args:
        block: to be run again.
        name: of the block, for messages.
        strategy: on whose behalf, for messages.
        keep: calls of operators whose results are kept, as ``addmm.1``.

    Raises:
        StrategyError: if it reads what cannot be read a second time.
    """
    return replace_forward(block, recomputed(block.forward, {name: block}, strategy, keep=keep))


def recomputed(
    forward: Callable[..., Any],
    reached: Mapping[str, object],
    strategy: str,
    *,
    keep: frozenset[str] = frozenset(),
) -> Callable[..., Any]:
    """Return a function that computes what another one does, and again in backward.

    Args:
        forward: to be run again.
        reached: the one object, by its name, through which ``forward`` finds all that it changes.
        strategy: on whose behalf, for messages.
        keep: calls of operators whose results are kept, as ``addmm.1``.

    Raises:
        StrategyError: if it reads what cannot be read a second time.
    """
    effects = ForwardState(reached, strategy)
    if effects.obstacle is not None:
        reason = (
            f"{next(iter(reached))} would be run a second time, and {effects.obstacle} Leave the "
            "block out by naming the others, or keep that outside of it."
        )
        raise StrategyError(strategy, reason)
    run = partial(_run_checkpointed, forward, effects, keep)
    effects.expect(run)  # where it takes the place of the block's forward
    return run


def _run_checkpointed(
    forward: Callable[..., Any],
    effects: ForwardState,
    keep: frozenset[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block's forward under checkpointing, when gradients are wanted at all."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = effects.before(*args, *kwargs.values())
    run = partial(
        checkpoint,
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=partial(_contexts, before, keep),
        **kwargs,
    )
    return effects.run(before, run)


def _contexts(
    before: Before, keep: frozenset[str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of recomputation.

    What there was before the forward is put back before the cache of what is kept begins to watch,
    which would take the copies for work of the block.
    """
    if not keep:
        return nullcontext(), before.shown()
    forward, recomputation = create_selective_checkpoint_contexts(_Keeping(keep))
    return _without_cached_casts(forward), _as_before(before, _without_cached_casts(recomputation))


@contextmanager
def _as_before(before: Before, inner: AbstractContextManager[Any]) -> Iterator[None]:
    with before.shown(), inner:
        yield


@contextmanager
def _without_cached_casts(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Let autocast cast each weight anew, in forward as in recomputation.

    A weight that another block has cast before would be cast in recomputation alone, and every
    cast after it would be taken for the one before.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


class _Keeping:
    """Say of each operator that a block calls whether its result is kept."""

    def __init__(self, keep: frozenset[str]) -> None:
        self._keep = keep
        self._num_calls: Counter[tuple[bool, str]] = Counter()

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = (context.is_recompute, operator_name(func))
        position = self._num_calls[key]
        self._num_calls[key] += 1
        if f"{key[1]}.{position}" in self._keep and not draws(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
