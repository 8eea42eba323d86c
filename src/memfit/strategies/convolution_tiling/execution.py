"""Carries a schedule out: forward stage by stage, and backward in the opposite order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit.live_state.torch_context import TorchContext
from memfit.strategies.convolution_tiling.schedule import Schedule, Stage
from memfit.strategies.convolution_tiling.slabs import Rows, Slab, cut, filled, tiles

_SINGLE_BYTES = 4


class TiledForwards:
    """One call of a module: its held tensors, from forward to backward."""

    def __init__(self, schedule: Schedule, device: Tensor) -> None:
        self.schedule, self.rules = schedule, schedule.rules
        self.values = schedule.rules.graph.values
        self.held: dict[int, Tensor] = {}
        self.statistics: dict[int, _Statistics] = {}
        self.context = TorchContext.here(device, draws=False)
        self.device = device.device
        self.grads: dict[int, Tensor] = {}
        self.needs: set[int] = set()
        self.wide: dict[int, Tensor] = {}
        self.read_later = frozenset(each for stage in schedule.stages for each in stage.sources)

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs."""
        self.held = dict(enumerate(given))
        with self.context.autocast(cache_enabled=False):
            for stage in self.schedule.stages:
                self._forward_stage(stage)
        graph = self.rules.graph
        return tuple(self.held[index] for index in graph.outputs)

    def _forward_stage(self, stage: Stage) -> None:
        if stage.kind == "whole":
            self.held.update(zip(stage.call.outs, self._whole(stage, self.held), strict=True))
            return
        if stage.kind == "statistics":
            self.statistics[stage.call.outs[0]] = self._measured(stage)
            return
        shape, dim = self.values[stage.target].shape, self.rules.dims[stage.target]
        for rows in tiles(shape[dim], stage.num_tiles):
            part = self._computed(stage, stage.target, rows, self.held)
            if stage.target not in self.held:
                self.held[stage.target] = part.new_empty(shape)
            self.held[stage.target].narrow(dim, rows[0], rows[1] - rows[0]).copy_(part)
            del part

    def _whole(self, stage: Stage, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        given = {each: tensors[each] for each in stage.call.inputs}
        args, kwargs = filled(stage.call, given, self.device)
        return tree_leaves(stage.call.function(*args, **kwargs))

    def _computed(
        self, stage: Stage, target: int, rows: Rows, tensors: Mapping[int, Tensor], lead: int = 0
    ) -> Tensor:
        """Compute rows of a value from held tensors.

        Args:
            stage: whose members lie on the way.
            target: the value.
            rows: of it.
            tensors: the held tensors, or leaves of their rows by ``~index``, see ``lead``.
            lead: unused rows ahead; 0.
        """
        wanted = self._wanted(stage, target, rows)
        slabs: dict[int, Slab] = {}
        for index in wanted:
            if index not in stage.members:
                slabs[index] = self._slab(index, wanted[index], tensors)
        for index in stage.members:
            if index in wanted and index not in slabs:
                slabs[index] = (
                    self._run(index, wanted[index], slabs, tensors),
                    wanted[index][0],
                )
        return cut(slabs[target], self.rules.dims[target], rows)

    def _slab(self, index: int, rows: Rows, tensors: Mapping[int, Tensor]) -> Slab:
        if ~index in tensors:
            return tensors[~index], rows[0]
        return tensors[index].narrow(self.rules.dims[index], rows[0], rows[1] - rows[0]), rows[0]

    def _run(
        self, index: int, rows: Rows, slabs: Mapping[int, Slab], tensors: Mapping[int, Tensor]
    ) -> Tensor:
        rule, call = self.rules.locals[index], self.rules.call_of[index]
        tracked = rule.needs(rows)
        others: dict[int, Any] = {
            each: tensors[each] for each in call.inputs if each not in tracked
        }
        if rule.statistics_of is not None:
            affine = self.statistics[index].affine
            others[index] = affine if affine is not None else self._affine(index, tensors)
        out = rule.run({each: slabs[each] for each in tracked}, others, rows)
        return out.to(self._norm_type(index, slabs)) if rule.statistics_of is not None else out

    def _norm_type(self, index: int, slabs: Mapping[int, Slab]) -> torch.dtype:
        """Ask torch, which has autocast choose, what a norm gives for such an input."""
        slab = slabs[self.rules.norms[index].source][0]
        return torch.nn.functional.group_norm(slab.new_ones((1, 1, 2)), 1).dtype

    def _wanted(self, stage: Stage, target: int, rows: Rows) -> dict[int, Rows]:
        """Return the rows of all values that rows of one need."""
        wanted = {target: rows}
        for index in sorted(stage.members, reverse=True):
            if index in wanted:
                for source, needed in self.rules.locals[index].needs(wanted[index]).items():
                    before = wanted.get(source, needed)
                    wanted[source] = min(before[0], needed[0]), max(before[1], needed[1])
        return wanted

    def _measured(self, stage: Stage) -> _Statistics:
        """Gather the statistics of a norm's input."""
        norm = self.rules.norms[stage.call.outs[0]]
        shape, dim = self.values[stage.target].shape, self.rules.dims[stage.target]
        total: _Statistics | None = None
        for rows in tiles(shape[dim], stage.num_tiles):
            part = self._computed(stage, stage.target, rows, self.held)
            flat = _wide(part).reshape(shape[0], norm.num_groups, -1)
            variance, mean = torch.var_mean(flat, dim=2, correction=0)
            new = _Statistics(mean, variance, flat.shape[2])
            total = new if total is None else _merged(total, new)
            del part, flat
        assert total is not None, "a tensor with elements has a row"
        return total

    def _affine(self, index: int, tensors: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        found = self.statistics[index]
        return self._scale_and_shift(index, found.mean, found.variance, tensors)

    def _scale_and_shift(
        self, index: int, mean: Tensor, variance: Tensor, tensors: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        norm, shape = self.rules.norms[index], self.values[index].shape
        width = shape[1] // norm.num_groups
        scale = (variance + norm.eps).rsqrt().repeat_interleave(width, dim=1)
        if norm.weight is not None:
            scale = scale * tensors[norm.weight].to(scale.dtype)
        shift = -mean.repeat_interleave(width, dim=1) * scale
        if norm.bias is not None:
            shift = shift + tensors[norm.bias].to(scale.dtype)
        ends = (1,) * (len(shape) - 2)
        return scale.reshape(*scale.shape, *ends), shift.reshape(*shift.shape, *ends)

    def backward(
        self, given: Sequence[Tensor], needs: Sequence[bool], grad_outputs: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of inputs, parameters and buffers."""
        num_inputs = self.rules.graph.num_inputs
        members = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(given, needs, strict=True)
        ]
        for place in range(num_inputs, len(given)):
            self.held[place] = members[place]
        self.needs = self.needing(needs)
        for index, grad in zip(self.rules.graph.outputs, grad_outputs, strict=True):
            if grad is not None:
                self.grads[index] = grad.clone() if index in self.read_later else grad
        for index in self.rules.norms:
            if index in self.needs:
                scale, shift = (
                    each.detach().requires_grad_() for each in self._affine(index, self.held)
                )
                self.statistics[index].affine = scale, shift
        with self.context.again(), self.context.autocast(cache_enabled=False):
            for stage in reversed(self.schedule.stages):
                self._backward_stage(stage)
                self._widen()
        grads: list[Tensor | None] = [self.grads.get(place) for place in range(num_inputs)]
        return grads + [self._of_member(tensor) for tensor in members[num_inputs:]]

    def _widen(self) -> None:
        """Sum gradients of parameters of half precision over tiles in single precision."""
        for place in range(self.rules.graph.num_inputs, self.rules.graph.num_given):
            member = self.held[place]
            if member.grad is not None and member.element_size() < _SINGLE_BYTES:
                before = self.wide.get(id(member))
                grad = member.grad.float()
                self.wide[id(member)] = grad if before is None else before.add_(grad)
                member.grad = None

    def _of_member(self, member: Tensor) -> Tensor | None:
        found = self.wide.get(id(member))
        return member.grad if found is None else found.to(member.dtype)

    def needing(self, needs: Sequence[bool]) -> set[int]:
        """Return the values that a gradient goes through."""
        found = {place for place, needed in enumerate(needs) if needed}
        for call in self.rules.graph.calls:
            if not found.isdisjoint(call.inputs) and call.name != "detach":
                found.update(each for each in call.outs if self.values[each].is_float)
        return found

    def _backward_stage(self, stage: Stage) -> None:
        if stage.kind == "whole":
            self._backward_whole(stage)
        elif stage.kind == "statistics":
            self._backward_statistics(stage)
        else:
            self._backward_rows(stage)

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.held.pop(index, None)
            self.grads.pop(index, None)

    def _backward_whole(self, stage: Stage) -> None:
        grads = [self.grads.get(each) for each in stage.call.outs]
        if any(grad is not None for grad in grads) and not self.needs.isdisjoint(stage.call.outs):
            leaves = dict(self.held)
            for index in stage.sources:
                leaves[index] = self.held[index].detach().requires_grad_(index in self.needs)
            with torch.enable_grad():
                outs = self._whole(stage, leaves)
            pairs = [
                (out, grad)
                for out, grad in zip(outs, grads, strict=True)
                if grad is not None and out.requires_grad
            ]
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            for index in dict.fromkeys(stage.sources):
                self._add(index, leaves[index].grad)
        self._drop(stage.call.outs)

    def _backward_statistics(self, stage: Stage) -> None:
        norm = stage.call.outs[0]
        found = self.statistics.pop(norm)
        if found.affine is None or found.affine[0].grad is None:
            return
        with torch.enable_grad():
            mean, variance = (
                each.detach().requires_grad_() for each in (found.mean, found.variance)
            )
            leaves = self._norm_leaves(norm)
            affine = self._scale_and_shift(norm, mean, variance, {**self.held, **leaves})
            torch.autograd.backward(affine, [each.grad for each in found.affine])
        for index, leaf in leaves.items():
            self._add(index, leaf.grad)
        assert mean.grad is not None, "the shift depends on the mean"
        assert variance.grad is not None, "the scale depends on the variance"
        if stage.target not in self.needs:
            return
        # The gradient of the input is a + b x, two numbers for each group.
        slope = 2 * variance.grad / found.count
        offset = mean.grad / found.count - slope * found.mean
        shape, dim = self.values[stage.target].shape, self.rules.dims[stage.target]
        width = shape[1] // slope.shape[1]
        ends = (1,) * (len(shape) - 2)
        slope, offset = (
            each.repeat_interleave(width, dim=1).reshape(shape[0], shape[1], *ends)
            for each in (slope, offset)
        )
        for rows in tiles(shape[dim], stage.num_tiles):
            if stage.target in self.schedule.held:
                part = self.held[stage.target].narrow(dim, rows[0], rows[1] - rows[0])
                grad = torch.addcmul(offset, _wide(part), slope)
                self._give(stage.target, rows, grad)
                continue

            def gradient(part: Tensor) -> Tensor:
                return torch.addcmul(offset, _wide(part.detach()), slope).to(part.dtype)

            self._backward_tile(stage, rows, gradient)

    def _norm_leaves(self, norm: int) -> dict[int, Tensor]:
        """Make leaves of a norm's weight and bias where they have been computed."""
        graph, found = self.rules.graph, self.rules.norms[norm]
        members = range(graph.num_inputs, graph.num_given)
        return {
            index: self.held[index].detach().requires_grad_(index in self.needs)
            for index in (found.weight, found.bias)
            if index is not None and index not in members
        }

    def _backward_rows(self, stage: Stage) -> None:
        target = stage.target
        grad, dim = self.grads.get(target), self.rules.dims[target]
        if grad is not None and target in self.needs:
            for rows in tiles(self.values[target].shape[dim], stage.num_tiles):
                part = grad.narrow(dim, rows[0], rows[1] - rows[0])
                if target in self.rules.convolutions:
                    self._backward_convolution(stage, rows, part)
                else:
                    self._backward_tile(stage, rows, lambda _, part=part: part)
        self._drop((target,))

    def _leaves(
        self, stage: Stage, target: int, rows: Rows
    ) -> tuple[dict[int, Rows], dict[int, Tensor]]:
        """Make leaves of the rows of held values that a tile reads."""
        wanted = self._wanted(stage, target, rows)
        leaves = dict(self.held)
        read = {index: each for index, each in wanted.items() if index not in stage.members}
        for index, needed in read.items():
            slab, _ = self._slab(index, needed, self.held)
            leaves[~index] = slab.detach().requires_grad_(index in self.needs)
        for index in stage.sources:
            if index not in read:
                leaves[index] = self.held[index].detach().requires_grad_(index in self.needs)
        return read, leaves

    def _backward_tile(self, stage: Stage, rows: Rows, gradient: Any) -> None:
        """Compute a tile again and go back through it."""
        read, leaves = self._leaves(stage, stage.target, rows)
        with torch.enable_grad():
            part = self._computed(stage, stage.target, rows, leaves)
        if part.requires_grad:
            torch.autograd.backward(part, gradient(part))
        del part
        self._collect(read, leaves)
        self._widen()

    def _collect(self, read: Mapping[int, Rows], leaves: Mapping[int, Tensor]) -> None:
        for index, needed in read.items():
            if (grad := leaves[~index].grad) is not None:
                self._give(index, needed, grad)
        members = range(self.rules.graph.num_inputs, self.rules.graph.num_given)
        for index, leaf in leaves.items():
            if index >= 0 and index not in members and leaf is not self.held.get(index):
                self._add(index, leaf.grad)

    def _add(self, index: int, grad: Tensor | None) -> None:
        """Add to the gradient of a held value."""
        if grad is not None:
            before = self.grads.get(index)
            self.grads[index] = grad if before is None else before.add_(grad)

    def _give(self, index: int, rows: Rows, grad: Tensor) -> None:
        """Add rows to the gradient of a held value."""
        if index not in self.grads:
            self.grads[index] = torch.zeros_like(self.held[index])
        self.grads[index].narrow(self.rules.dims[index], rows[0], rows[1] - rows[0]).add_(grad)

    def _backward_convolution(self, stage: Stage, rows: Rows, grad: Tensor) -> None:
        """Go back through a convolution without computing its result again."""
        found = self.rules.convolutions[stage.target]
        needed = self.rules.locals[stage.target].needs(rows)[found.source]
        members = tuple(each for each in stage.members if each != stage.target)
        inner = Stage(
            call=stage.call,
            target=found.source,
            kind=stage.kind,
            sources=stage.sources,
            members=members,
        )
        read, leaves = self._leaves(inner, found.source, needed)
        with torch.enable_grad():
            if found.source in members:
                source = self._computed(inner, found.source, needed, leaves)
            else:
                source = leaves[~found.source]
            seen = found.windows.padded((source, needed[0]), found.dim, rows)
        weight = leaves[found.weight]
        bias = None if found.bias is None else leaves[found.bias]
        mask = [seen.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
        grads = torch.ops.aten.convolution_backward(
            grad.contiguous(),
            seen.detach().to(grad.dtype),
            weight.detach().to(grad.dtype),
            None if bias is None else list(bias.shape),
            found.stride,
            found.padding,
            found.dilation,
            False,
            [0] * len(found.stride),
            found.groups,
            mask,
        )
        for tensor, found_grad in ((weight, grads[1]), (bias, grads[2])):
            if tensor is not None and tensor.requires_grad:
                torch.autograd.backward(tensor, found_grad.to(tensor.dtype))
        if mask[0]:
            torch.autograd.backward(seen, grads[0].to(seen.dtype))
        del seen, source
        self._collect(read, leaves)
        self._widen()


@dataclass(slots=True)
class _Statistics:
    """Mean and variance of each group of a norm's input, each (B, G), in fp32 or fp64."""

    mean: Tensor
    variance: Tensor
    count: int
    affine: tuple[Tensor, Tensor] | None = None
    """Scale and shift of each channel, (B, C, 1, …), leaves that collect gradients in backward."""


def _wide(tensor: Tensor) -> Tensor:
    """Return half precision in single precision."""
    return tensor.float() if tensor.element_size() < _SINGLE_BYTES else tensor


def _merged(first: _Statistics, second: _Statistics) -> _Statistics:
    """Merge the statistics of two parts (Chan et al. 1979, STAN-CS-79-773, equation 2.1)."""
    count = first.count + second.count
    apart = second.mean - first.mean
    part = second.count / count
    variance = (
        first.variance * (1 - part) + second.variance * part + apart.square() * part * (1 - part)
    )
    return _Statistics(first.mean + apart * part, variance, count)
