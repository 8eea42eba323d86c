"""Reads the per-sample gradients of a batch, as factors, in one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memfit.errors import JobError

from .factors import Factor, dense, in_type
from .layouts import Layout, layout_of, sample_weights
from .operators import read
from .products import DEFAULT_LIMIT_BYTES, Products
from .samples import Samples
from .uses import Key, Use, edge_of, uses_of

SampleLoss = Callable[[nn.Module, Any], Tensor]
"""``(model, batch of B samples) -> losses (B,)``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGradients:
    """The gradients of B samples: for each parameter its factors, one for each use."""

    num_samples: int
    factors: Mapping[str, list[Factor]]

    def inner_products(self, other: SampleGradients, limit_bytes: int) -> Tensor:
        """Return the inner products of all pairs, (B, B'), with a bound on what is made."""
        products, found = Products(limit_bytes=limit_bytes), None
        for mine, theirs in self._pairs(other):
            part = products.between(mine, theirs)
            # What was made may be kept for the next pair, so it is not added to in place.
            found = part if found is None else found + part
        if found is None:
            msg = "No parameter that was chosen has a gradient. Choose others, or all."
            raise JobError(msg)
        return found

    def squared_norms(self, limit_bytes: int) -> Tensor:
        """Return each sample's inner product with itself, (B,)."""
        products, found = Products(limit_bytes=limit_bytes), None
        for each in self.factors.values():
            for place, one in enumerate(each):
                for other in each[place:]:
                    part = products.paired(one, other) * (1.0 if one is other else 2.0)
                    found = part if found is None else found + part
        if found is None:
            msg = "No parameter that was chosen has a gradient. Choose others, or all."
            raise JobError(msg)
        return found

    def _pairs(self, other: SampleGradients) -> Iterator[tuple[Factor, Factor]]:
        for name, mine in self.factors.items():
            for one in mine:
                for another in other.factors.get(name, ()):
                    yield one, another


@dataclass(kw_only=True, eq=False)
class GradientReader:
    """Reads per-sample gradients of one loss of one model.

    It learns as it reads: in which rows of which operator the samples lie is found out once for
    each use of a parameter. What cannot be read as factors is made by a backward pass for each
    sample.
    """

    model: nn.Module
    loss: SampleLoss
    parameters: dict[str, nn.Parameter]
    """Those whose gradients matter, by name; all need gradients."""
    unread: dict[str, str] = field(default_factory=dict)
    """The parameters whose gradients are made by backward passes, and why."""
    unproved: frozenset[str] = frozenset()
    """Parameters whose gradients are too large to be made even once, for the proof."""
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    has_values: bool = True
    """Whether tensors have values to look at, as those of a recorded step have not."""
    types: dict[str, torch.dtype] = field(default_factory=dict)
    """In which type a parameter's gradients are computed, as autocast changes it."""
    _known: dict[Key, tuple[int, bool]] = field(default_factory=dict)
    """How samples lie, for each use for which it was found out."""
    _shared: set[Key] = field(default_factory=set)
    """The uses whose result has no samples in it, but is computed once for all of them."""

    def of_loss(self, loss: SampleLoss) -> GradientReader:
        """Return a reader of another loss, which has learned nothing yet."""
        return replace(self, loss=loss, unread={}, types={}, _known={}, _shared=set())

    def losses(self, batch: Any) -> Tensor:
        """Compute the losses of a batch, (B,), where the parameters lie.

        Raises:
            JobError: if the loss gives something else.
        """
        device = next(iter(self.parameters.values())).device
        found = self.loss(self.model, tree_map_only(Tensor, lambda each: each.to(device), batch))
        if not isinstance(found, Tensor) or found.dim() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            msg = f"The loss gave {shape}; needed is a tensor (B,), the loss of each sample."
            raise JobError(msg)
        return found

    def read(self, samples: Samples, rows: Tensor) -> SampleGradients:
        """Read the gradients of some samples, rows (B,) int64.

        Raises:
            JobError: if the loss does not give a loss for each sample.
        """
        wanted = {n: each for n, each in self.parameters.items() if n not in self.unread}
        factors: dict[str, list[Factor]] = {}
        not_read = set(self.unread)
        while wanted:
            losses = self.losses(samples.batch(rows))
            check_number(losses, len(rows))
            if losses.grad_fn is None:
                break
            found = self._factors(losses, wanted)
            del losses
            if found is not None:  # else something was learned, with which to begin anew
                factors, failed = found
                not_read |= failed
                break
        for name in not_read:
            factors.pop(name, None)
        factors |= self._by_backward_passes(samples, rows, not_read)
        ordered = {name: factors[name] for name in self.parameters if name in factors}
        return SampleGradients(num_samples=len(rows), factors=ordered)

    def _factors(
        self, losses: Tensor, wanted: Mapping[str, Tensor]
    ) -> tuple[dict[str, list[Factor]], set[str]] | None:
        """Read what can be read as factors, and name the parameters for which this fails.

        Returns:
            None if an operator was found whose result has no samples in it.
        """
        made_by = {use: read(use) for use in uses_of(losses, wanted, self._shared)}
        if not made_by:
            return {}, set()
        grads, layouts = self._gradients(losses, list(made_by))
        parts: dict[tuple[str, Any], list[Factor]] = {}
        failed: dict[str, str] = {}
        num_shared = len(self._shared)
        for use, made in made_by.items():
            grad, layout = grads[use.node], layouts.get(use)
            if grad is None:
                continue
            if layout is None:
                self._shared.add(use.key)
                continue
            with torch.no_grad():
                factor = None if made is None else made(grad, layout)
            if factor is None:
                failed.setdefault(use.name, f"it is used by {use.kind} in a way that is not read")
            else:
                self._note_type(use.name, grad.dtype)
                kept = in_type(factor, wanted[use.name].dtype)
                parts.setdefault((use.name, use.through), []).append(kept)
        if len(self._shared) > num_shared:
            return None
        del grads, made_by
        self.unread |= {name: why for name, why in failed.items() if name not in self.unread}
        read_well = {key: each for key, each in parts.items() if key[0] not in failed}
        return _by_parameter(read_well, wanted), set(failed)

    def _gradients(
        self, losses: Tensor, uses: list[Use]
    ) -> tuple[dict[Any, Tensor | None], dict[Use, Layout]]:
        """Go back to the operators' outputs, twice where it is not known how samples lie."""
        nodes = list(dict.fromkeys(use.node for use in uses))
        edges = [edge_of(node) for node in nodes]
        num_samples = len(losses)
        unknown = [use for use in uses if self.has_values and not self._knows(use, num_samples)]
        grads = torch.autograd.grad(
            losses.sum(), edges, retain_graph=bool(unknown), allow_unused=True
        )
        of_node = dict(zip(nodes, grads, strict=True))
        layouts = {
            use: Layout(*known, num_samples=num_samples)
            for use in uses
            if use not in unknown
            and (known := self._known.get(use.key) or self._assumed(use)) is not None
        }
        if unknown:
            weights = sample_weights(losses.detach())
            again = list(dict.fromkeys(use.node for use in unknown))
            weighted = torch.autograd.grad(
                losses, [edge_of(node) for node in again], weights, allow_unused=True
            )
            of_weighted = dict(zip(again, weighted, strict=True))
            for use in unknown:
                plain, other = of_node[use.node], of_weighted[use.node]
                if plain is not None and other is not None:
                    layouts |= self._learned(use, plain, other, weights)
        return of_node, layouts

    def _note_type(self, name: str, dtype: torch.dtype) -> None:
        """Note in which type a parameter's gradients are computed, the least exact of all uses."""
        known = self.types.get(name, self.parameters[name].dtype)
        self.types[name] = max(known, dtype, key=lambda each: torch.finfo(each).eps)

    def _knows(self, use: Use, num_samples: int) -> bool:
        """Return whether it is known how samples lie in a use, and that fits its shape."""
        known = self._known.get(use.key)
        if known is None:
            return False
        shape = use.node._input_metadata[0].shape
        return known[0] < len(shape) and shape[known[0]] % num_samples == 0

    def _assumed(self, use: Use) -> tuple[int, bool] | None:
        """Take the layout of the like uses of a parameter, where there are no values to look at."""
        if self.has_values:
            return None
        like = (known for key, known in self._known.items() if key[:-1] == use.like)
        return next(like, (0, True))

    def _learned(
        self, use: Use, plain: Tensor, weighted: Tensor, weights: Tensor
    ) -> dict[Use, Layout]:
        """Find the layout of a use, and keep it where there is no doubt."""
        found, is_certain = layout_of(plain, weighted, weights)
        if found is None:
            return {}
        if is_certain:
            self._known[use.key] = (found.dim, found.is_major)
        return {use: found}

    def _by_backward_passes(
        self, samples: Samples, rows: Tensor, names: set[str]
    ) -> dict[str, list[Factor]]:
        """Make the gradients of some parameters by a backward pass for each sample."""
        chosen = {name: each for name, each in self.parameters.items() if name in names}
        if not chosen:
            return {}
        made = {
            name: torch.zeros((len(rows), *each.shape), dtype=each.dtype, device=each.device)
            for name, each in chosen.items()
        }
        for place in range(len(rows)):
            found = self.gradient(samples, rows[place : place + 1], chosen)
            for name, grad in found.items():
                made[name][place] = grad
        return {name: [dense(made[name], tuple(chosen[name].shape))] for name in chosen}

    def gradient(
        self, samples: Samples, row: Tensor, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Make the gradients of one sample, row (1,) int64, by one backward pass."""
        with self._needed_alone(parameters):
            losses = self.losses(samples.batch(row))
        check_number(losses, 1)
        if losses.grad_fn is None:
            return {}
        grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        pairs = zip(parameters, grads, strict=True)
        return {
            name: grad.to_dense() if grad.layout != torch.strided else grad
            for name, grad in pairs
            if grad is not None
        }

    @contextmanager
    def _needed_alone(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Have no others need gradients: a function of Python makes those of all that do."""
        others = [each for name, each in self.parameters.items() if name not in parameters]
        for each in others:
            each.requires_grad_(False)
        try:
            yield
        finally:
            for each in others:
                each.requires_grad_(True)


def _by_parameter(
    parts: Mapping[tuple[str, Any], list[Factor]], parameters: Mapping[str, Tensor]
) -> dict[str, list[Factor]]:
    """Gather factors by parameter, those of what is computed of it brought back to it."""
    factors: dict[str, list[Factor]] = {}
    for (name, through), each in parts.items():
        back = each if through is None else [_brought_back(each, through, parameters[name])]
        factors.setdefault(name, []).extend(back)
    return factors


def _brought_back(factors: list[Factor], through: Any, parameter: Tensor) -> Factor:
    """Bring the gradients of what a node computes of parameters back to one of these.

    Args:
        factors: of the gradients of the node's result, one for each use of it.
        through: the node, whose part of the graph is still there: it has no samples in it, so the
            backward pass ended above it.
        parameter: the one that is meant.
    """
    shape = tuple(through._input_metadata[0].shape)
    made = factors[0].block(0, factors[0].num_rows)
    for each in factors[1:]:
        made = made + each.block(0, each.num_rows)
    found = parameter.new_zeros((len(made), *parameter.shape))
    for place in range(len(made)):
        (grad,) = torch.autograd.grad(
            [edge_of(through)],
            [parameter],
            [made[place].reshape(shape)],
            retain_graph=True,
            allow_unused=True,
        )
        if grad is not None:
            found[place] = grad
    return dense(found, tuple(parameter.shape))


def check_number(losses: Tensor, num_samples: int) -> None:
    """Refuse losses that are not one for each sample.

    Raises:
        JobError: if there are more or fewer.
    """
    if len(losses) != num_samples:
        msg = (
            f"The loss gave {len(losses)} losses for {num_samples} samples; needed is one for "
            "each. "
            "Sum what belongs to one sample, for example over its tokens."
        )
        raise JobError(msg)
