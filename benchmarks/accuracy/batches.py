"""Batches of rows: random values in the shapes and dtypes that the authors gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .calls import parse_call
from .packages import CannotRebuild
from .rows import InputTensor, Row

_TARGETS = {"labels", "label", "target", "targets", "y"}
_DEFAULT_CLASSES = 1000


def make_batch(row: Row, model: nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Make the tensors of one batch on a device, in their order; shared ones are made once."""
    batch: dict[str, torch.Tensor] = {}
    for spec in row.inputs:
        if spec.same_tensor_as is not None:
            if spec.same_tensor_as not in batch:
                reason = f"input {spec.name} is the same tensor as one that comes later"
                raise CannotRebuild(reason)
            batch[spec.name] = batch[spec.same_tensor_as]
        else:
            batch[spec.name] = _make(spec, num_values(spec, row, model), device)
    return batch


def num_values(spec: InputTensor, row: Row, model: nn.Module) -> int:
    """Count the values that an integer tensor may take: the vocabulary, or the classes."""
    config = getattr(model, "config", None)
    is_target = spec.name in _TARGETS
    if config is not None and row.model_library == "transformers":
        if is_target and len(spec.shape) == 1:
            return int(getattr(config, "num_labels", 2))
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        return int(getattr(text_config, "vocab_size", _DEFAULT_CLASSES))
    if is_target:
        return _num_classes(row, model)
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    return min(sizes, default=_DEFAULT_CLASSES)


def _num_classes(row: Row, model: nn.Module) -> int:
    """Count the classes of a model that is no transformers model."""
    call = parse_call(row.constructor.get("call"))
    if call is not None and isinstance(call.kwargs.get("num_classes"), int):
        return int(call.kwargs["num_classes"])
    outputs = [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]
    return int(outputs[-1]) if row.model_library == "custom" and outputs else _DEFAULT_CLASSES


def _make(spec: InputTensor, high: int, device: str) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRebuild(f"input {spec.name} has the dtype {spec.dtype!r}, which torch lacks")
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if dtype.is_floating_point:
        return torch.randn(spec.shape, **options)
    if "mask" in spec.name or dtype is torch.bool:
        return torch.ones(spec.shape, **options)
    if spec.name == "token_type_ids":
        return torch.zeros(spec.shape, **options)
    return torch.randint(0, high, spec.shape, **options)
