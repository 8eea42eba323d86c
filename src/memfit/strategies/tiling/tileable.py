"""Finds the blocks of a model that can be computed tile by tile along a dimension.

What a module does is not read off its name: its forward is run on meta tensors, which takes no
memory, and its operators are followed. See memfit.strategies.tiling.locality.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.forward_state import not_repeatable
from memfit.live_state import Change, LiveState
from memfit.live_state.findings import ChangeKind
from memfit.session.members import members_replaced
from memfit.strategies.tiling.locality import Locality, locality
from memfit.strategies.tiling.locality_rules import OwnGeneratorError

_Call = Callable[[torch.Tensor], Any]
_Convolution = nn.modules.conv._ConvNd
_LOCAL_LAYERS = (
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.RMSNorm,
    nn.modules.dropout._DropoutNd,
    _Convolution,
)
_LOCAL_KINDS = ("torch.nn.modules.activation", "torch.nn.modules.container")
_DRAWS_OF_TORCH = (ChangeKind.GENERATOR, "torch")
"""From torch's global generator, whose state is put back when a tile is computed again."""
_FEWEST_STEPS = 2
_MOST_WIDTHS = 4
_EXTENTS = (5, 7, 11, 13, 17, 19)
_OTHER_EXTENT = 23
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileableDims:
    """Along which dimensions of its input a block can be tiled, and what that takes.

    Attributes:
        dims: all dimensions but the last (tokens), or one dimension of space or time.
        halo: the positions to either side that a tile must see.
        draws: whether the block draws random numbers.
    """

    dims: tuple[int, ...]
    halo: int
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TileableBlock:
    """A block that can be tiled, by its name in the model."""

    name: str
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectfulBlock:
    """A block that would be tiled, did it not change more than its output.

    ``sentence`` says what it changes.
    """

    name: str
    sentence: str


def find_tileable_blocks(model: nn.Module) -> tuple[TileableBlock, ...]:
    """Find the outermost blocks that can be tiled; their inputs' sizes are guessed."""
    return tuple(block for block in judged_blocks(model) if isinstance(block, TileableBlock))


def judged_blocks(model: nn.Module) -> tuple[TileableBlock | EffectfulBlock, ...]:
    """Find the outermost blocks that can be tiled, and those that only effects keep from it."""
    judged: dict[Any, tuple[TileableDims | None, str]] = {}
    return tuple(_found(model, "", judged))


def _found(
    module: nn.Module, name: str, judged: dict[Any, tuple[TileableDims | None, str]]
) -> Iterator[TileableBlock | EffectfulBlock]:
    key = _likeness(module)
    if key not in judged:
        judged[key] = _dims_at_some_size(module)
    dims, effect = judged[key]
    if dims is not None:
        yield TileableBlock(name=name, draws=dims.draws)
        return
    if effect:
        yield EffectfulBlock(name=name, sentence=f"{name or 'the model'} {effect}")
    for child_name, child in module.named_children():
        yield from _found(child, f"{name}.{child_name}" if name else child_name, judged)


def dims_of_call(block: nn.Module, call: _Call, shape: Sequence[int]) -> TileableDims | None:
    """Return how one call of a block can be tiled; None if it cannot.

    Args:
        block: the module.
        call: its forward as a function of the tensor that it is given.
        shape: of that tensor.
    """
    if len(shape) < 2 or not _may_be_tileable(block):
        return None
    trials = _Trials(block)
    return _along_tokens(trials, call, shape) or _along_space(trials, call, shape)


def _dims_at_some_size(block: nn.Module) -> tuple[TileableDims | None, str]:
    """Try inputs that fit the sizes of a block's parameters.

    Returns:
        How the block can be tiled, and otherwise the effect that keeps it from it, or nothing.
    """
    if not _may_be_tileable(block):
        return None, ""
    trials = _Trials(block)
    # The likeliest sizes of the input's last dimension first.
    sizes = [size for p in block.parameters() if p.dim() for size in (p.shape[-1], p.shape[0])]
    for width in list(dict.fromkeys(int(size) for size in sizes))[:_MOST_WIDTHS]:
        if dims := _along_tokens(trials, block.forward, (1, 1, width)):
            return dims, ""
    for layer in _convolutions(block)[:_MOST_WIDTHS]:
        shape = (2, layer.in_channels, *_EXTENTS[: len(layer.kernel_size)])
        if dims := _along_space(trials, block.forward, shape):
            return dims, ""
    return None, trials.effect


def _along_tokens(trials: _Trials, call: _Call, shape: Sequence[int]) -> TileableDims | None:
    """Try all dimensions but the last, on a few and on a single line of positions."""
    num_dims = len(shape) - 1
    if num_dims > len(_EXTENTS):
        return None
    line = (1,) * (num_dims - 1) + (_OTHER_EXTENT,)
    shapes = [(*extents, shape[-1]) for extents in (_EXTENTS[:num_dims], line)]
    axes = tuple(range(num_dims))
    found = trials.locality_at(call, shapes, axes, along=0)
    if found is None:
        return None
    return TileableDims(dims=axes, halo=found.halo, draws=found.draws)


def _along_space(trials: _Trials, call: _Call, shape: Sequence[int]) -> TileableDims | None:
    """Try dimensions of space or time, the longest first, where the block has convolutions."""
    layers = _convolutions(trials.block)
    rank = len(layers[0].kernel_size) if layers else 0
    if not rank or len(shape) <= rank:
        return None
    for dim in sorted(range(len(shape) - rank, len(shape)), key=lambda dim: -shape[dim]):
        shapes = [
            (*shape[:dim], extent, *shape[dim + 1 :]) for extent in (_EXTENTS[-1], _OTHER_EXTENT)
        ]
        # As one more axis each, other dimensions may be merged with the one that is tiled.
        channels = len(shape) - rank - 1
        everything = tuple(each for each in range(len(shape)) if each != channels)
        for axes in ((dim,), everything):
            if found := trials.locality_at(call, shapes, axes, along=dim):
                return TileableDims(dims=(dim,), halo=found.halo, draws=found.draws)
    return None


class _Trials:
    """Run a block on meta tensors, and leave everything that it can reach as it was.

    Attributes:
        block: the block.
        effect: what it has changed although it treats positions apart, as the end of a sentence.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.effect = ""
        members = (*block.parameters(), *block.buffers())
        state = LiveState({"": block}, leave_out=members)
        self._may_run = not_repeatable(state.obstacles) is None
        self._before = state.snapshot()

    def locality_at(
        self,
        call: _Call,
        shapes: Iterable[Sequence[int]],
        axes: tuple[int, ...],
        *,
        along: int,
    ) -> Locality | None:
        """Run the block on tensors of several shapes, which must make no difference."""
        found: Locality | None = None
        for shape in shapes:
            other = self._locality(partial(locality, call, shape, axes, along=along))
            # A number that follows the extents, such as 1 / number of tokens, would differ in a
            # tile.
            if other is None or (found is not None and other != found):
                return None
            found = other
        return found if found and found.num_steps >= _FEWEST_STEPS else None

    def _locality(self, trial: Callable[..., Locality]) -> Locality | None:
        """Run the block; None if it brings positions together, or may do so, or has an effect."""
        if not self._may_run:
            return None
        stand_ins: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in stand_ins:
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                shape = tuple(tensor.shape)
                stand_ins[id(tensor)] = torch.empty(shape, dtype=dtype, device="meta")
            return stand_ins[id(tensor)]

        found = None
        try:
            with _disable_current_modes(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with members_replaced(self.block, stand_in):
                    found = trial(stand_ins.values())
        except OwnGeneratorError:
            self.effect = "draws from a torch.Generator of its own"
        except Exception:  # noqa: BLE001, S110 - whatever a module says to such a tensor means no
            pass
        return None if self._has_effect(is_local=found is not None) else found

    def _has_effect(self, *, is_local: bool) -> bool:
        """Return whether the trial has changed anything, and put it back."""
        changes = self._before.changes()
        self._before.restore()  # what nobody tells of as well, such as a cache's first result
        effects = [change for change in changes if (change.kind, change.owner) != _DRAWS_OF_TORCH]
        if effects and is_local:
            self.effect = _effect_of(effects[0])
        return bool(effects)


def _effect_of(change: Change) -> str:
    """Return what a block does besides computing its output."""
    if change.kind is ChangeKind.GENERATOR:
        return f"draws from {change.full_name}"
    return f"changes {change}"


def _may_be_tileable(block: nn.Module) -> bool:
    """Leave out what is plainly not, so that little code of the user's is run on trial.

    Hooks inside a block would be called once per tile.
    """
    inner = [module for module in block.modules() if module is not block]
    return (
        bool(inner)
        and any(True for _ in block.parameters())
        and all(_may_be_local(module) for module in (block, *inner))
        and not any(getattr(module, hooks, None) for module in inner for hooks in _HOOKS)
    )


def _may_be_local(module: nn.Module) -> bool:
    """Judge torch's layers by their class; the rest shows when it is run."""
    kind = type(module).__module__
    if not kind.startswith("torch.nn.modules"):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return False
    return isinstance(module, _LOCAL_LAYERS) or kind in _LOCAL_KINDS


def _convolutions(block: nn.Module) -> list[Any]:
    return [module for module in block.modules() if isinstance(module, _Convolution)]


def _rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the fractions that a module keeps, such as how often it drops."""
    for name, value in vars(module).items():
        if isinstance(value, float):
            yield name, value


def _likeness(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules have in common that are built alike: one of them is tried for all."""
    members = (*module.named_parameters(), *module.named_buffers())
    return (
        repr(module),
        tuple((type(part), part.training, *_rates(part)) for part in module.modules()),
        tuple((name, tuple(tensor.shape)) for name, tensor in members),
        tuple(bool(getattr(part, hooks, None)) for part in module.modules() for hooks in _HOOKS),
    )
