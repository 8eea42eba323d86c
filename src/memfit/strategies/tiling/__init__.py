"""Tiling: blocks that treat positions apart are computed tile by tile, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.errors import StrategyError
from memfit.forward_state import ForwardState
from memfit.live_state.torch_context import TorchContext
from memfit.session.block_names import first_few
from memfit.session.forwards import replace_forward
from memfit.session.members import members_replaced
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.tiling.tileable import (
    EffectfulBlock,
    TileableBlock,
    TileableDims,
    dims_of_call,
    find_tileable_blocks,
    judged_blocks,
)

_NUM_TILES = (4, 16)


@dataclass(frozen=True, slots=True)
class TileableBlocks:
    """The outermost modules that treat positions (tokens, space, time) apart."""

    names: tuple[str, ...] = ()
    with_dropout: tuple[str, ...] = ()
    """Those of them that draw random masks."""
    with_effects: Mapping[str, str] = field(default_factory=dict)
    """Modules that only their effects keep from being among them, each with a sentence."""


@dataclass(frozen=True, kw_only=True)
class Tiling(Strategy):
    """Compute blocks tile by tile along tokens, space or time, forward and again in backward.

    What is alive inside a block is that of one tile; from forward to backward only its input is
    kept. A block qualifies if its output at a position depends on the input there (an MLP), or on a
    fixed neighbourhood (a chain of convolutions), which tiles then overlap by. This is found out
    by following its operators on tensors without values, not by its name. The outermost such
    blocks are taken. Where dropout lies inside one, masks are drawn per tile, and the same ones
    again in backward: same in law.

    Limits: about one forward of the blocks more; convolutions compute overlaps twice, so a deep
    chain over a short dimension gains little. Dropout between convolutions, BatchNorm and GroupNorm
    over space, pooling, strides and padding other than zeros are left alone. A call with
    several tensors, or with one that the block does not treat apart, is run as it is.
    Gradients cannot be differentiated again. In 16-bit parameters, gradients add up in 16 bits.
    Source: Arctic Long Sequence Training, https://arxiv.org/abs/2506.13996, on tiled MLPs; for
    overlapping tiles of convolutions Alwani et al. 2016, "Fused-layer CNN accelerators", MICRO.
    """

    num_tiles: int
    blocks: tuple[str, ...] = ()

    name: ClassVar[str] = "tiling"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    goes_with_shards: ClassVar[bool] = True
    never_faster: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_at_least(2, "num_tiles")

    @classmethod
    def own_facts(cls, session: Session) -> TileableBlocks:
        """Look for blocks that can be tiled."""
        judged = judged_blocks(session.model)
        tileable = [block for block in judged if isinstance(block, TileableBlock)]
        return TileableBlocks(
            names=tuple(block.name for block in tileable),
            with_dropout=tuple(block.name for block in tileable if block.draws),
            with_effects={
                block.name: block.sentence for block in judged if isinstance(block, EffectfulBlock)
            },
        )

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer ever more tiles, of all blocks that can be tiled."""
        for num_tiles in _NUM_TILES if facts.of(TileableBlocks).names else ():
            yield cls(num_tiles=num_tiles)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models without such a block, and names of other blocks."""
        found = facts.of(TileableBlocks)
        unknown = [name for name in self.blocks if name not in found.names]
        for name in unknown if found.names else found.with_effects:
            if name in found.with_effects:
                return (
                    f"{found.with_effects[name]}, which it would do once for each tile, and in "
                    "backward again."
                )
        if not found.names:
            return (
                "no block of the model treats positions apart (an MLP over tokens, or a chain of "
                "convolutions of stride 1 that keep the size), so there is nothing to tile."
            )
        if not unknown:
            return None
        known = [name or "'' (the whole model)" for name in found.names]
        return f"{', '.join(unknown)} cannot be tiled; what can is: {first_few(known)}."

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Dropout masks inside a tiled block differ from those of the whole block."""
        found = facts.of(TileableBlocks)
        drawing = set(self.blocks or found.names) & set(found.with_dropout)
        return Numerics.SAME_IN_LAW if drawing else Numerics.EXACT

    def apply(self, session: Session) -> Undo:
        """Have the chosen blocks computed tile by tile."""
        names = self.blocks or [block.name for block in find_tileable_blocks(session.model)]
        blocks = [session.model.get_submodule(name) for name in names]
        with ExitStack() as undos:
            for name, block in zip(names, blocks, strict=True):
                undos.callback(replace_forward(block, TiledForward(block, self.num_tiles, name)))
            return undos.pop_all().close


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of positions, and the larger range that is computed to know them."""

    start: int
    stop: int
    seen_start: int
    seen_stop: int

    def seen(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what the tile is computed from."""
        return tensor.narrow(dim, self.seen_start, self.seen_stop - self.seen_start)

    def kept(self, computed: torch.Tensor, dim: int) -> torch.Tensor:
        """Crop what was computed to the tile."""
        if (self.start, self.stop) == (self.seen_start, self.seen_stop):
            return computed
        return computed.narrow(dim, self.start - self.seen_start, self.stop - self.start)

    def place(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tile's place in a tensor of all positions."""
        return tensor.narrow(dim, self.start, self.stop - self.start)


def tiles(num_positions: int, num_tiles: int, halo: int) -> Iterator[Tile]:
    """Cut positions into tiles; the last may be smaller. At the borders there is no halo."""
    size = max(1, -(-num_positions // num_tiles))
    for start in range(0, num_positions, size):
        stop = min(start + size, num_positions)
        yield Tile(start, stop, max(0, start - halo), min(stop + halo, num_positions))


class TiledForward:
    """Stand in for the forward of a block."""

    def __init__(self, block: torch.nn.Module, num_tiles: int, name: str = "") -> None:
        self.block = block
        self._forward = block.forward
        self._effects = ForwardState({name: block}, Tiling.name)
        self._num_tiles = num_tiles
        self._dims: dict[Any, TileableDims | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block tile by tile, or as it is where this call cannot be tiled."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(places) != 1 or not leaves[places[0]].is_floating_point():
            return self._forward(*args, **kwargs)
        inputs, leaves[places[0]] = leaves[places[0]], None

        def call(tensor: torch.Tensor) -> Any:
            filled = [tensor if place == places[0] else leaf for place, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(filled, spec)
            return self._forward(*args, **kwargs)

        dims = self._dims_of(call, inputs, (repr(leaves), str(spec))) if inputs.numel() else None
        if dims is None:
            return self._forward(*args, **kwargs)
        tiled = TiledCall(self.block, call, dims, self._num_tiles)
        before = self._effects.before()
        out = self._effects.run(
            before, partial(_Tiled.apply, tiled, inputs, *self.block.parameters())
        )
        if change := before.first_change():
            reason = (
                f"a forward of a tiled block changes {change}, once for each tile. Leave the block "
                "out by naming the others, or do without the change."
            )
            raise StrategyError(Tiling.name, reason)
        return out

    def _dims_of(
        self, call: Callable[[torch.Tensor], Any], inputs: torch.Tensor, others: Any
    ) -> TileableDims | None:
        """Judge a call of this form once."""
        longest_first = sorted(range(inputs.dim()), key=lambda dim: -inputs.shape[dim])
        form = (*longest_first, inputs.shape[-1], self.block.training, others)
        if form not in self._dims:
            self._dims[form] = dims_of_call(self.block, call, inputs.shape)
        return self._dims[form]


class TiledCall:
    """One call of a block, tile by tile; what backward needs is kept, tensors by autograd."""

    def __init__(
        self,
        block: torch.nn.Module,
        call: Callable[[torch.Tensor], torch.Tensor],
        dims: TileableDims,
        num_tiles: int,
    ) -> None:
        self.block = block
        self._call = call
        self._num_tiles = num_tiles
        self._halo = dims.halo
        self._draws = dims.draws
        self._is_over_tokens = dims.dims[0] == 0
        # Tokens are laid out in one line, as the last dimension but one.
        self._dim = dims.dims[-1]
        self._context: TorchContext | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        self._context = TorchContext.here(inputs, draws=self._draws)
        line = self._in_line(inputs)
        out: torch.Tensor | None = None
        # Copies of weights that autocast makes without gradients must not be found by others.
        with self._context.autocast(cache_enabled=False):
            for tile in self._tiles(line):
                part = tile.kept(self._call(tile.seen(line, self._dim)), self._dim)
                if out is None:
                    out = _empty_like(part, self._dim, line.shape[self._dim])
                tile.place(out, self._dim).copy_(part)
                del part
        assert out is not None, "a tensor with elements has a position"
        return self._as_before(out, inputs)

    def backward(
        self, inputs: torch.Tensor, grad_output: torch.Tensor, *, needs_inputs: bool
    ) -> torch.Tensor | None:
        """Compute the gradient of the input; those of parameters add up in ``.grad``."""
        line, grad_line = self._in_line(inputs), self._in_line(grad_output)
        grad_inputs = None
        if needs_inputs:
            make = torch.zeros_like if self._halo else torch.empty_like
            grad_inputs = make(line)
        assert self._context is not None, "forward comes first"
        with self._context.again():
            for tile in self._tiles(line):
                leaf = tile.seen(line, self._dim).detach().requires_grad_(needs_inputs)
                with torch.enable_grad():
                    part = tile.kept(self._call(leaf), self._dim)
                if part.requires_grad:
                    torch.autograd.backward(part, tile.place(grad_line, self._dim))
                del part
                if grad_inputs is not None:
                    self._give(tile.seen(grad_inputs, self._dim), leaf.grad)
                del leaf
        return None if grad_inputs is None else self._as_before(grad_inputs, inputs)

    def _give(self, target: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Write a tile's part of the gradient; where tiles overlap, parts add up."""
        if self._halo:
            target.add_(0.0 if gradient is None else gradient)
        else:
            target.copy_(torch.zeros_like(target) if gradient is None else gradient)

    def _tiles(self, line: torch.Tensor) -> Iterator[Tile]:
        return tiles(line.shape[self._dim], self._num_tiles, self._halo)

    def _in_line(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay tokens out in one line; the number of dimensions stays."""
        if not self._is_over_tokens:
            return tensor
        return tensor.reshape((1,) * (tensor.dim() - 2) + (-1, tensor.shape[-1]))

    def _as_before(self, line: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return tokens their dimensions back."""
        if not self._is_over_tokens:
            return line
        return line.reshape((*inputs.shape[:-1], line.shape[-1]))


class _Tiled(torch.autograd.Function):
    """Keep a block's input, and compute everything else again in backward."""

    @staticmethod
    def forward(
        ctx: Any, call: TiledCall, inputs: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output without a graph."""
        ctx.call = call
        ctx.save_for_backward(inputs, *parameters)
        return call.forward(inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and of the parameters.

        Raises:
            StrategyError: if the gradients are to be differentiated again.
        """
        if torch.is_grad_enabled():
            reason = (
                "gradients of a tiled block are to be differentiated again, and only the first "
                "derivative can be tiled. Do without create_graph=True, or leave the block out."
            )
            raise StrategyError(Tiling.name, reason)
        inputs, *parameters = ctx.saved_tensors
        needs_inputs, *needs = ctx.needs_input_grad[1:]
        # Leaves of their own: hooks on the parameters must fire once, not once per tile.
        leaves = [
            parameter.detach().requires_grad_(needed)
            for parameter, needed in zip(parameters, needs, strict=True)
        ]
        leaf_of = dict(zip(map(id, ctx.call.block.parameters()), leaves, strict=True))
        with members_replaced(ctx.call.block, lambda tensor: leaf_of.get(id(tensor), tensor)):
            grad_inputs = ctx.call.backward(inputs, grad_output, needs_inputs=needs_inputs)
        return None, grad_inputs, *(leaf.grad for leaf in leaves)


def _empty_like(part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """Make an empty tensor with another extent, laid out in memory in the same order."""
    strides = part.stride()
    order = sorted(range(part.dim()), key=lambda each: -strides[each])
    shape = [extent if each == dim else part.shape[each] for each in order]
    return part.new_empty(shape).permute([order.index(each) for each in range(part.dim())])
