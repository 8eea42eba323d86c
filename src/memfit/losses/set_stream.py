"""Walks over a set chunk by chunk, twice: for sums over it, and for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.errors import JobError
from memfit.live_state.torch_context import TorchContext
from memfit.losses.gradient_sums import GradientSums, leaves_behind
from memfit.losses.ranks import add_over_ranks
from memfit.losses.softmax_sums import SoftmaxSums, term_gradients

if TYPE_CHECKING:
    from memfit.losses.ranks import Group

_Call = Callable[..., Sequence[Tensor]]


@dataclass(slots=True, kw_only=True)
class SetStream:
    """One streamed computation: how it is cut, and what its two passes share."""

    terms: _Call
    prepare: _Call | None
    chunk: int
    tile: int
    group: Group | None
    num_members: int
    """Tensors of members among all that are given; the others are inputs."""
    leaves: list[Tensor] = field(default_factory=list)
    """The parameters that ``prepare`` and ``terms`` use: those that were named, and leaves."""
    _context: TorchContext | None = None
    _first: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
    """The first chunk's prepared members and first terms, until they are added up."""

    def parted(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Part tensors into members and inputs."""
        return tensors[: self.num_members], tensors[self.num_members :]

    def begin(self, members: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the first terms with a graph, and give the parameters found in it."""
        self._context = TorchContext.here(*members, *inputs)
        own_members = _standing_in(members, slice(0, self.chunk))
        own_inputs = _standing_in(inputs, slice(0, self.tile))
        with self._context.autocast(cache_enabled=False):
            prepared = self.prepared_members(own_members)
            terms = self.terms(*prepared, *own_inputs)
        named = [each for each in self.leaves if each.requires_grad]
        own = {id(each) for each in (*own_members, *own_inputs, *named)}
        found = leaves_behind(terms, named)
        self.leaves = [*named, *(each for each in found if id(each) not in own)]
        self._first = [each.detach() for each in prepared], [each.detach() for each in terms]
        return self.leaves

    def sums(self, members: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return log-sum-exp (B,) and means (B, M...) over the whole set."""
        autocast = (self._context or TorchContext.here(*inputs, draws=False)).autocast
        sums: list[SoftmaxSums] = []
        with torch.no_grad(), autocast(cache_enabled=False):
            for rows in self._chunks(members):
                self._add_chunk(sums, [each[rows] for each in members], inputs)
        if self.group is not None:
            sums[0].merge(self.group)
        log_sum_exp_B, means = sums[0].results()
        return [log_sum_exp_B, *means]

    def gradients(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Any]
    ) -> list[Tensor | None]:
        """Return the gradients of members, inputs and parameters, given those of the results.

        Raises:
            JobError: if a chunk uses a parameter that the first one does not.
        """
        assert self._context is not None, "begun before the first pass"
        members, inputs = self.parted(tensors)
        second = _SecondPass(self, members, inputs, GradientSums(self.leaves))
        with self._context.again():
            for rows in self._chunks(members):
                second.go_through(rows, results, gradients)
        return second.found(self.group)

    def tiles(self, num_samples: int) -> Iterator[slice]:
        """Yield the samples of each tile."""
        for start in range(0, num_samples, self.tile):
            yield slice(start, min(start + self.tile, num_samples))

    def _chunks(self, members: Sequence[Tensor]) -> Iterator[slice]:
        for start in range(0, len(members[0]), self.chunk):
            yield slice(start, min(start + self.chunk, len(members[0])))

    def prepared_members(self, members: Sequence[Tensor]) -> Sequence[Tensor]:
        """Do what is done once per member."""
        return members if self.prepare is None else self.prepare(*members)

    def _add_chunk(
        self, sums: list[SoftmaxSums], members: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Add one chunk's terms, tile by tile."""
        prepared = None
        for samples in self.tiles(len(inputs[0])):
            if self._first is not None:
                (prepared, terms), self._first = self._first, None
            else:
                prepared = self.prepared_members(members) if prepared is None else prepared
                terms = self.terms(*prepared, *(each[samples] for each in inputs))
            log_weight_BC, *values = terms
            if not sums:
                sums.append(SoftmaxSums.empty(len(inputs[0]), log_weight_BC, values))
            sums[0].add(samples, log_weight_BC, values)


class _SecondPass:
    """Computes chunks once more, and adds up their gradients."""

    def __init__(
        self,
        stream: SetStream,
        members: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: GradientSums,
    ) -> None:
        self._stream, self._members, self._inputs = stream, members, inputs
        self._parameters = parameters
        self._of_members = [torch.zeros_like(t) if t.requires_grad else None for t in members]
        self._of_inputs = [torch.zeros_like(t) if t.requires_grad else None for t in inputs]

    def go_through(self, rows: slice, results: Sequence[Tensor], gradients: Sequence[Any]) -> None:
        """Add the gradients of one chunk."""
        members = _standing_in(self._members, rows)
        with torch.enable_grad(), self._parameters.collecting():
            prepared = self._stream.prepared_members(members)
        if self._stream.prepare is None:
            _add_to(self._of_members, rows, self._of_chunk(prepared, results, gradients))
            return
        shared = _standing_in(prepared)
        of_shared = self._of_chunk(shared, results, gradients)
        del shared
        self._check(prepared, members)
        outputs = [
            each for each, found in zip(prepared, of_shared, strict=True) if found is not None
        ]
        found = self._parameters.add_from(
            outputs, [each for each in of_shared if each is not None], also=members
        )
        _add_to(self._of_members, rows, found)

    def _of_chunk(
        self, shared: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Any]
    ) -> list[Tensor | None]:
        """Return the gradients of a chunk's prepared members, and add those of all else."""
        total: list[Tensor | None] = [None] * len(shared)
        for samples in self._stream.tiles(len(self._inputs[0])):
            inputs = _standing_in(self._inputs, samples)
            of_tile = [None if each is None else each[samples] for each in gradients]
            found = self._of_tile(shared, inputs, [each[samples] for each in results], of_tile)
            total = [_sum(a, b) for a, b in zip(total, found[: len(shared)], strict=True)]
            _add_to(self._of_inputs, samples, found[len(shared) :])
        return total

    def _of_tile(
        self,
        shared: Sequence[Tensor],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        gradients: Sequence[Any],
    ) -> list[Tensor | None]:
        with torch.enable_grad(), self._parameters.collecting():
            terms = self._stream.terms(*shared, *inputs)
        self._check(terms, (*shared, *inputs))
        log_weight_BC, *values = (each.detach() for each in terms)
        of_terms = term_gradients(log_weight_BC, values, results, gradients)
        return self._parameters.add_from(terms, of_terms, also=(*shared, *inputs))

    def _check(self, outputs: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Refuse what hangs on a parameter that is not summed for.

        Raises:
            JobError: if there is one.
        """
        known = {id(each) for each in (*self._stream.leaves, *own)}
        unknown = [
            each for each in leaves_behind(outputs, self._stream.leaves) if id(each) not in known
        ]
        if unknown:
            shapes = ", ".join(str(tuple(each.shape)) for each in unknown)
            msg = (
                f"A chunk of softmax_mean uses parameters of shapes {shapes} that the first chunk "
                "does not, so their gradients would be lost. Use the same ones for every chunk, or "
                "leave the chunk size out."
            )
            raise JobError(msg)

    def found(self, group: Group | None) -> list[Tensor | None]:
        """Return all gradients, added up over the ranks of a group."""
        if group is not None:
            for each in (*self._of_inputs, *map(self._parameters.sum_of, self._stream.leaves)):
                if each is not None:
                    add_over_ranks(each, group)
        of_leaves = (self._parameters.result(each) for each in self._stream.leaves)
        return [*self._of_members, *self._of_inputs, *of_leaves]


def _standing_in(tensors: Sequence[Tensor], rows: slice | None = None) -> list[Tensor]:
    """Return leaves with the same values, or some rows of them, that want a gradient alike."""
    return [
        (each if rows is None else each[rows]).detach().requires_grad_(each.requires_grad)
        for each in tensors
    ]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _add_to(totals: Sequence[Tensor | None], rows: slice, found: Sequence[Tensor | None]) -> None:
    for total, each in zip(totals, found, strict=True):
        if total is not None and each is not None:
            total[rows] += each
