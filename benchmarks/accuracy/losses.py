"""Loss expressions of rows, run without running text as code.

An expression such as ``cross_entropy(model(x), target)`` is parsed, and only what losses are made
of is run: the model, the batch, ``torch.nn`` losses, tensor methods and arithmetic.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .packages import CannotRebuild
from .rows import Row

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, Any]]
"""Gives the loss, and what the model returned."""

_PREFIX = re.compile(r"\b(?:torch\.nn\.functional|nn\.functional|torch\.nn|nn|F)\.")
_PROSE_AFTER = re.compile(r";|,?\s+(?:inside|under|with|without|where|over|in)\s")
_TARGETS = ("labels", "label", "target", "targets", "y")
_OTHER_NAMES = {"ids": "input_ids", "tokens": "input_ids", "input": "inputs"}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def loss_of(row: Row) -> Loss:
    """Return the loss function of a row.

    Raises:
        CannotRebuild: if the expression is missing or says what cannot be run.
    """
    text = row.loss or ""
    node = _parsed(text)
    if node is None:
        node = _parsed(_expression_for(text, row))
    if node is None:
        raise CannotRebuild(f"the loss {text!r} is no expression")
    expression = node

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
        evaluation = _Evaluation(model, batch)
        value = evaluation.of(expression)
        if not isinstance(value, torch.Tensor):
            raise CannotRebuild(f"the loss {text!r} gives {type(value).__name__}, not a tensor")
        return value, evaluation.output

    return loss


def _parsed(text: str) -> ast.expr | None:
    """Parse the expression at the start of a text; None where there is none with the model."""
    text = _PREFIX.sub("", text)
    for candidate in (text, _PROSE_AFTER.split(text)[0]):
        try:
            node = ast.parse(candidate.strip().rstrip(",."), mode="eval").body
        except SyntaxError:
            continue
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        if "model" in names:
            return node
    return None


def _expression_for(text: str, row: Row) -> str:
    """Translate what is said in words."""
    words = text.lower().replace("_", " ")
    names = [tensor.name for tensor in row.inputs if tensor.same_tensor_as is None]
    output = f"model({names[0]})"
    if row.model_library == "transformers":
        output = f"model({', '.join(f'{name}={name}' for name in names if name not in _TARGETS)})"
    if "hidden" in words:
        return f"{output}.last_hidden_state.float().pow(2).mean()"
    if "cross" in words and "entropy" in words:
        return f"cross_entropy({output}, {names[-1]})"
    if "mse" in words or ("mean" in words and "square" in words):
        return f"mse_loss({output}, {names[-1]})" if len(names) > 1 else f"{output}.pow(2).mean()"
    if "sum" in words:
        return f"{output}.sum()"
    if "mean" in words:
        return f"{output}.mean()"
    return "model(**batch).loss" if "model" in words and "loss" in words else ""


class _Evaluation:
    """Run one expression; what is only intermediate is dropped as Python drops it."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model = model
        self._batch = batch
        self.output: Any = None

    def of(self, node: ast.expr) -> Any:
        """Run one node of the expression."""
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotRebuild(f"the loss has {ast.unparse(node)!r}, which is not supported")
        return method(node)

    def _run_model(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._model(*args, **kwargs)
        return self.output

    def _of_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _of_name(self, node: ast.Name) -> Any:
        if node.id == "model":
            return self._run_model
        if node.id == "batch":
            return dict(self._batch)
        tensor = self._tensor(node.id)
        if tensor is not None:
            return tensor
        found = getattr(F, node.id, None) or getattr(nn, node.id, None)
        if found is None or node.id.startswith("_"):
            raise CannotRebuild(f"the loss names {node.id!r}, which is not in the batch")
        return found

    def _tensor(self, name: str) -> torch.Tensor | None:
        """Find a tensor by the name in the expression, or by its place in the batch."""
        for known in (name, _OTHER_NAMES.get(name, name)):
            if known in self._batch:
                return self._batch[known]
        tensors = list(self._batch.values())
        if name in _TARGETS:
            return tensors[-1]
        return tensors[0] if name in {"x", "inputs", "images", "input_ids"} else None

    def _of_attribute(self, node: ast.Attribute) -> Any:
        if node.attr.startswith("_"):
            raise CannotRebuild(f"the loss uses {node.attr!r}, which is private")
        return getattr(self.of(node.value), node.attr)

    def _of_call(self, node: ast.Call) -> Any:
        function = self.of(node.func)
        args = [self.of(each) for each in node.args]
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.of(keyword.value)
            kwargs |= {keyword.arg: value} if keyword.arg else value
        return function(*args, **kwargs)

    def _of_binop(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _ARITHMETIC:
            raise CannotRebuild(f"the loss has {ast.unparse(node)!r}, which is not supported")
        return _ARITHMETIC[type(node.op)](self.of(node.left), self.of(node.right))

    def _of_unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value

    def _of_subscript(self, node: ast.Subscript) -> Any:
        return self.of(node.value)[self.of(node.slice)]

    def _of_slice(self, node: ast.Slice) -> slice:
        return slice(*(each and self.of(each) for each in (node.lower, node.upper, node.step)))

    def _of_tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.of(each) for each in node.elts)
