"""What CUDA's kernels take besides what they return: workspaces and scratch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.attention_scratch import attention_hidden_bytes
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.scratch import cuda_scratch
from memfit.kernels.cuda.workspaces import (
    Product,
    cublas_workspace_bytes,
    lt_workspace_bytes,
    uses_lt,
)
from memfit.trace.operators import tensors_in
from memfit.virtual.cuda.attention import AttentionQuestion
from memfit.virtual.cuda.operators import question_of
from memfit.virtual.cuda.placement import is_on_card

_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "addbmm", "_addmm_activation", "dot"}
)
_FIRST_MATRIX = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0}
_FUSED_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}
_BACKWARD = "_backward"
_BIAS_PLACE = {"efficient": 4, "cudnn": 8}
_DROPOUT_PLACE = {"flash": 10, "efficient": 9, "cudnn": 13}
_CAUSAL_PLACE = {"flash": 11, "efficient": 11, "cudnn": 14}


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
        self, operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Sequence[int], Scratch | None]:
        """Return the workspaces that an operator makes for good, in bytes, and its scratch."""
        if not any(is_on_card(tensor) for tensor in tensors_in((out, args))):
            return (), None  # an operator of the CPU
        attention = _FUSED_ATTENTION.get(operator.removesuffix(_BACKWARD))
        if attention is not None:
            return (), self._attention(attention, operator.endswith(_BACKWARD), args, kwargs)
        scratch = cuda_scratch(operator, args, kwargs, out, self._card)
        product = operator.removesuffix("_")
        if product not in _PRODUCTS:
            return (), scratch
        made, temporary = self._workspaces(product, args, kwargs)
        return made, _together(scratch, temporary)

    def _workspaces(
        self, operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[int], Scratch | None]:
        """Return what the libraries of matrix products take the first time on a thread.

        The forward runs on the caller's thread and the backward on autograd's for the device.
        """
        card, is_backward = self._card, torch._C._current_graph_task_id() != -1
        made: list[int] = []
        scratch = None
        if self._is_first("cublas", is_backward):
            made.append(self._cublas_bytes())
        if uses_lt(card.torch_version, _product(operator, args, kwargs)):
            lt = lt_workspace_bytes(card.capability, card.torch_version, config=self._config)
            if not lt.kept and lt.added_bytes:
                scratch = Scratch(
                    blocks=(lt.added_bytes,),
                    low_bytes=0,
                    high_bytes=lt.added_bytes,
                    certainty=lt.certainty,
                    source=lt.source,
                )
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

    def _attention(
        self, backend: str, is_backward: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Scratch | None:
        """Return what a fused attention kernel takes inside."""
        hidden = attention_hidden_bytes(backend, self._question(backend, is_backward, args, kwargs))
        blocks = hidden.backward_blocks if is_backward else hidden.forward_blocks
        if not blocks:
            return None
        return Scratch(
            blocks=blocks,
            low_bytes=sum(blocks),
            high_bytes=sum(blocks),
            certainty=hidden.certainty,
            source=hidden.source,
        )

    def _question(
        self, backend: str, is_backward: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AttentionQuestion:
        query, key, value = args[1:4] if is_backward else args[:3]
        bias_place = _BIAS_PLACE.get(backend) if is_backward else 3
        mask = None
        if bias_place is not None and backend != "flash" and len(args) > bias_place:
            mask = args[bias_place]
        dropout_place = _DROPOUT_PLACE[backend] if is_backward else 3 + 2 * (backend != "flash")
        causal_place = _CAUSAL_PLACE[backend] if is_backward else dropout_place + 1
        return question_of(
            self._card,
            query,
            key,
            value,
            mask,
            dropout=float(_argument(args, kwargs, dropout_place, "dropout_p", 0.0)),
            is_causal=bool(_argument(args, kwargs, causal_place, "is_causal", False)),
            enable_gqa=False,
        )


def _together(first: Scratch | None, second: Scratch | None) -> Scratch | None:
    """Add up what one operator takes for two reasons."""
    if first is None or second is None:
        return first or second
    return Scratch(
        blocks=first.blocks + second.blocks,
        low_bytes=first.low_bytes + second.low_bytes,
        high_bytes=first.high_bytes + second.high_bytes,
        certainty=second.certainty,
        source=f"{first.source}; {second.source}",
    )


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _product(operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product:
    """Describe a matrix product to the rules."""
    first = _FIRST_MATRIX.get(operator, 1)
    left, right = args[first], args[first + 1]
    bias = args[0] if first else None
    return Product(
        operator=f"aten::{operator}",
        dtype=str(left.dtype).removeprefix("torch."),
        left_shape=tuple(left.shape),
        right_shape=tuple(right.shape),
        bias_shape=() if bias is None else tuple(bias.shape),
        is_bias_contiguous=bias is None or bias.is_contiguous(),
        beta=float(kwargs.get("beta", 1)),
    )
