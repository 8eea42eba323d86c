"""What CUDA's kernels take besides what they return: workspaces and scratch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.cuda.workspaces import (
    Product,
    cublas_workspace_bytes,
    lt_workspace_bytes,
    uses_lt,
)
from memfit.kernels.registration import Rule, call_rule
from memfit.kernels.scratch import Scratch
from memfit.trace.operators import operator_name, tensors_in
from memfit.virtual.cuda.placement import is_on_card


class CudaKernels:
    """The kernels of one card; tensors on the card count."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._held: set[tuple[str, bool]] = set()
        self._config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Count tensors of the card."""
        return is_on_card(tensor)

    def around(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Sequence[int], Scratch | None]:
        """Return the workspaces that an operator makes for good, in bytes, and its scratch."""
        operator = CUDA_OPERATORS.find(func)
        if operator is None or not any(is_on_card(each) for each in tensors_in((out, args))):
            return (), None

        def ask(rule: Rule | None) -> Any:
            if rule is None:
                return None
            name = operator_name(func).removesuffix("_")
            context = {"name": name, "out": out, "card": self._card}
            answer = call_rule(rule, func, args, kwargs, **context)
            return None if answer is NotImplemented else answer

        made: Sequence[int] = ()
        scratch, product = ask(operator.scratch), ask(operator.product)
        if kept := ask(operator.keeps):
            made = [kept] if self._is_first(operator_name(func), False) else ()
        if product is not None:
            made, temporary = self._workspaces(product)
            scratch = scratch + temporary if scratch and temporary else scratch or temporary
        return made, scratch

    def _workspaces(self, product: Product) -> tuple[Sequence[int], Scratch | None]:
        """Return what the libraries of matrix products take the first time on a thread.

        The forward runs on the caller's thread and the backward on autograd's for the device.
        """
        card, is_backward = self._card, torch._C._current_graph_task_id() != -1
        made: list[int] = []
        scratch = None
        if self._is_first("cublas", is_backward):
            made.append(self._cublas_bytes())
        if uses_lt(card.torch_version, product):
            lt = lt_workspace_bytes(card.capability, card.torch_version, config=self._config)
            if not lt.kept and lt.added_bytes:
                blocks = (lt.added_bytes,)
                scratch = Scratch.between(lt.source, blocks, low_bytes=0, certainty=lt.certainty)
            elif lt.added_bytes and self._is_first("cublaslt", is_backward):
                made.append(lt.added_bytes)
        return made, scratch

    def _cublas_bytes(self) -> int:
        """Return cuBLAS's workspace: as measured on the card, unless the environment sets it."""
        card = self._card
        if card.cublas_workspace_bytes is not None and self._config is None:
            return card.cublas_workspace_bytes
        return cublas_workspace_bytes(card.capability, card.torch_version, self._config)

    def _is_first(self, library: str, is_backward: bool) -> bool:
        key = (library, is_backward)
        is_new = key not in self._held
        self._held.add(key)
        return is_new
