"""Reads the autograd graph of a batch's losses: where each parameter is used, by which operator.

Nothing is assumed of modules. A parameter that a module and a function of the loss share, or that
several modules share, has several uses, and all of them are in the graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TRANSPOSES = ("TBackward", "TransposeBackward", "PermuteBackward")


@dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """One operator's use of a parameter."""

    name: str
    """The parameter's name."""
    shape: tuple[int, ...]
    """The parameter's shape."""
    node: Any
    """The operator's node in the autograd graph."""
    position: int
    """Which of the operator's inputs the parameter is."""
    is_transposed: bool
    """Whether the operator takes the parameter, which is then a matrix, transposed."""
    number: int
    """How many uses of this parameter by such an operator come before this one in the graph."""

    @property
    def kind(self) -> str:
        """Return the operator's name in the graph, such as ``AddmmBackward``."""
        return kind_of(self.node)

    @property
    def key(self) -> tuple[object, ...]:
        """Return what tells this use from the others of the same model, in any batch."""
        return self.name, self.kind, self.position, self.number


def kind_of(node: Any) -> str:
    """Name the operator of a node, without the number of its overload."""
    return re.sub(r"\d+$", "", str(node.name()))


def uses_of(losses: Tensor, parameters: Mapping[str, Tensor]) -> list[Use]:
    """List the uses of parameters in the graph of losses (B,), in an order that batches share.

    Args:
        losses: with their graph.
        parameters: those that matter, by name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    numbers: Counter[tuple[object, ...]] = Counter()
    found = []
    for node, position, parameter, is_transposed in _edges(losses.grad_fn, names):
        name = names[id(parameter)]
        counted = (name, kind_of(node), position)
        found.append(
            Use(
                name=name,
                shape=tuple(parameter.shape),
                node=node,
                position=position,
                is_transposed=is_transposed,
                number=numbers[counted],
            )
        )
        numbers[counted] += 1
    return found


def _edges(root: Any, names: Mapping[int, str]) -> Iterator[tuple[Any, int, Tensor, bool]]:
    """Yield the edges between operators and parameters: node, input, parameter, transposed."""
    nodes = list(_nodes(root))
    transposed = {node: found for node in nodes if (found := _transposed(node, names)) is not None}
    for node in nodes:
        if node in transposed:
            continue
        for position, (below, _) in enumerate(node.next_functions):
            if below in transposed:
                yield node, position, transposed[below], True
            elif (parameter := _parameter_at(below, names)) is not None:
                yield node, position, parameter, False


def _transposed(node: Any, names: Mapping[int, str]) -> Tensor | None:
    """Return the parameter that a node gives transposed, if it does that and no more."""
    if not kind_of(node).startswith(_TRANSPOSES) or not node.next_functions:
        return None
    parameter = _parameter_at(node.next_functions[0][0], names)
    if parameter is None or parameter.dim() != 2 or not _swaps(node, parameter):
        return None
    return parameter


def _nodes(root: Any) -> Iterator[Any]:
    """Yield every node of a graph once, from the losses down."""
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                pending.append(below)


def _parameter_at(node: Any, names: Mapping[int, str]) -> Tensor | None:
    """Return the parameter whose gradient a node accumulates, if it is one that matters."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable if variable is not None and id(variable) in names else None


def _swaps(node: Any, parameter: Tensor) -> bool:
    """Return whether a node gives the transposed matrix, rather than the matrix as it is."""
    if kind_of(node) == "TBackward":
        return True
    if kind_of(node) == "PermuteBackward":
        return tuple(dim % 2 for dim in node._saved_dims) == (1, 0)
    # Dimensions are saved as unsigned numbers, -1 as the largest of them.
    return _as_dim(node._saved_dim0) != _as_dim(node._saved_dim1) and parameter.dim() == 2


def _as_dim(number: int) -> int:
    return int(number) % 2 if number < 2**63 else int(number - 2**64) % 2


def edge_of(node: Any) -> torch.autograd.graph.GradientEdge:
    """Return the place in the graph where the gradient of an operator's output arrives."""
    return torch.autograd.graph.GradientEdge(node, 0)
