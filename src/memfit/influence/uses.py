"""Reads the autograd graph of a batch's losses: where each parameter is used, by which operator.

Nothing is assumed of modules. A parameter that a module and a function of the loss share, or that
several modules share, has several uses, and all of them are in the graph.

What is computed of parameters alone, once for the whole batch, has no samples in it: a normalised
weight, positions that are looked up once. Its result takes the place of the parameter, and what the
operators that use it give is brought back to the parameter afterwards.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_TRANSPOSES = ("TBackward", "TransposeBackward", "PermuteBackward")
_CONVERTS = "ToCopyBackward"
Key = tuple[object, ...]
"""What tells a use from the others of the same model, in any batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """One operator's use of a parameter, or of what is computed of parameters alone."""

    name: str
    """The parameter's name."""
    shape: tuple[int, ...]
    """Of what is used."""
    node: Any
    """The operator's node in the autograd graph."""
    position: int
    """Which of the operator's inputs it is."""
    is_transposed: bool
    """Whether the operator takes what is used, which is then a matrix, transposed."""
    number: int
    """How many uses of the same by such an operator come before this one in the graph."""
    through: Any = None
    """The node that computes what is used of parameters; None if it is the parameter itself."""
    path: Key = ()
    """The keys of the uses on the way there."""

    @property
    def kind(self) -> str:
        """Return the operator's name in the graph, such as ``AddmmBackward``."""
        return kind_of(self.node)

    @property
    def like(self) -> Key:
        """Return what the uses of the same parameter by like operators have in common."""
        return self.name, self.path, self.kind, self.position

    @property
    def key(self) -> Key:
        """Return what tells this use from the others."""
        return *self.like, self.number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Origin:
    """What is used: a parameter, or the result of a node."""

    name: str
    shape: tuple[int, ...]
    node: Any
    through: Any = None
    path: Key = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """Who uses what each node gives."""

    users: Mapping[Any, list[tuple[Any, int, int]]]
    """By node: the nodes that take one of its results, at which input, and which result."""
    leaves: Mapping[int, Any]
    """The nodes of tensors whose gradients are accumulated, by the tensor's identity."""
    counts: Counter[Key] = field(default_factory=Counter)

    @classmethod
    def below(cls, root: Any) -> _Graph:
        users: dict[Any, list[tuple[Any, int, int]]] = defaultdict(list)
        leaves = {}
        for node in _nodes(root):
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves[id(variable)] = node
            for position, (below, output) in enumerate(node.next_functions):
                if below is not None:
                    users[below].append((node, position, output))
        return cls(users=users, leaves=leaves)

    def uses(self, origin: _Origin) -> Iterator[Use]:
        """Yield the uses of a parameter or of a node's first result."""
        yield from self._below(origin, origin.node, is_transposed=False)

    def _below(self, origin: _Origin, node: Any, *, is_transposed: bool) -> Iterator[Use]:
        """Yield who uses what a node gives, looking through those that transpose or convert it."""
        for user, position, output in self.users.get(node, ()):
            if output:  # of the other results of a node nothing is known
                yield self._use(origin, user, -1, is_transposed=is_transposed)
            elif kind_of(user) == _CONVERTS:
                yield from self._below(origin, user, is_transposed=is_transposed)
            elif len(origin.shape) == 2 and _swaps(user):
                yield from self._below(origin, user, is_transposed=not is_transposed)
            else:
                yield self._use(origin, user, position, is_transposed=is_transposed)

    def _use(self, origin: _Origin, node: Any, position: int, *, is_transposed: bool) -> Use:
        counted = (origin.name, origin.path, kind_of(node), position)
        self.counts[counted] += 1
        return Use(
            name=origin.name,
            shape=origin.shape,
            node=node,
            position=position,
            is_transposed=is_transposed,
            number=self.counts[counted] - 1,
            through=origin.through,
            path=origin.path,
        )


def kind_of(node: Any) -> str:
    """Name the operator of a node, without the number of its overload."""
    return re.sub(r"\d+$", "", str(node.name()))


def uses_of(
    losses: Tensor, parameters: Mapping[str, Tensor], shared: Collection[Key] = ()
) -> list[Use]:
    """List the uses of parameters in the graph of losses (B,), in an order that batches share.

    Args:
        losses: with their graph.
        parameters: those that matter, by name.
        shared: the keys of uses that compute of parameters alone, in whose place the uses of what
            they compute are listed.
    """
    graph = _Graph.below(losses.grad_fn)
    found = []
    pending = [
        _Origin(name=name, shape=tuple(each.shape), node=graph.leaves[id(each)])
        for name, each in parameters.items()
        if id(each) in graph.leaves
    ]
    seen = set()
    while pending:
        origin = pending.pop(0)
        for use in graph.uses(origin):
            if use.key not in shared:
                found.append(use)
            elif (use.name, use.node) not in seen:
                seen.add((use.name, use.node))
                shape = tuple(use.node._input_metadata[0].shape)
                pending.append(
                    _Origin(
                        name=use.name, shape=shape, node=use.node, through=use.node, path=use.key
                    )
                )
    return found


def _nodes(root: Any) -> Iterator[Any]:
    """Yield every node of a graph once, from the losses down."""
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)


def _swaps(node: Any) -> bool:
    """Return whether a node gives a matrix transposed, and does nothing else."""
    kind = kind_of(node)
    if kind not in _TRANSPOSES:
        return False
    if kind == "TBackward":
        return True
    if kind == "PermuteBackward":
        return tuple(_as_dim(dim) for dim in node._saved_dims) == (1, 0)
    return _as_dim(node._saved_dim0) != _as_dim(node._saved_dim1)


def _as_dim(number: int) -> int:
    """Read a dimension of a matrix, which is saved as an unsigned number: -1 as the largest."""
    return int(number) % 2 if number < 2**63 else int(number - 2**64) % 2


def edge_of(node: Any) -> torch.autograd.graph.GradientEdge:
    """Return the place in the graph where the gradient of an operator's output arrives."""
    return torch.autograd.graph.GradientEdge(node, 0)
