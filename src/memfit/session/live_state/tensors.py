"""Keeps tensors: their content to the bit, their shape and storage, and their flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Form(NamedTuple):
    """What a tensor looks like, besides its content."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    """Which one it lies in."""
    offset: int
    storage_bytes: int


class Flags(NamedTuple):
    """What a tensor says to autograd."""

    requires_grad: bool
    grad: torch.Tensor | None
    hooks: Any
    accumulated_hooks: Any
    is_leaf: bool


def form_of(tensor: torch.Tensor) -> Form | None:
    """Describe a tensor; None where it has no storage of its own, such as a sparse one."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return Form(
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        storage._cdata,
        int(tensor.storage_offset()),
        storage.nbytes(),
    )


def flags_of(tensor: torch.Tensor, *, with_grad: bool) -> Flags:
    """Read what a tensor says to autograd."""
    is_leaf = tensor.is_leaf
    return Flags(
        tensor.requires_grad,
        tensor.grad if with_grad and is_leaf else None,
        tensor._backward_hooks,
        getattr(tensor, "_post_accumulate_grad_hooks", None),
        is_leaf,
    )


def has_content(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has bytes that can be read: fake ones and those on meta have none."""
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not hasattr(tensor, "__tensor_flatten__")
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give the stretch of memory that a tensor lies in, as a flat tensor of bytes."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    size = tensor.element_size()
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in extents)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return flat.set_(storage, tensor.storage_offset() * size, ((last + 1) * size,), (1,))


@dataclass(slots=True)
class KeptTensor:
    """One tensor as it was."""

    tensor: torch.Tensor
    form: Form | None
    flags: Flags
    twin: torch.Tensor | None
    """The same memory under the same form; None for tensors without content."""
    content: torch.Tensor | None


def keep(tensor: torch.Tensor, *, with_content: bool, with_grad: bool) -> KeptTensor:
    """Keep a tensor as it is."""
    has = has_content(tensor)
    return KeptTensor(
        tensor,
        form_of(tensor),
        flags_of(tensor, with_grad=with_grad),
        tensor.detach() if has else None,
        bytes_of(tensor).clone() if has and with_content else None,
    )


def put_back(kept: KeptTensor, *, with_grad: bool) -> None:
    """Make a tensor what it was.

    Raises:
        RuntimeError: if it has become part of an autograd graph and cannot leave it.
    """
    tensor, flags = kept.tensor, kept.flags
    if flags.is_leaf and not tensor.is_leaf:
        tensor.detach_()
    if kept.twin is not None and form_of(tensor) != kept.form:
        _put_form_back(kept, kept.twin)
    if tensor.is_leaf and tensor.requires_grad != flags.requires_grad:
        tensor.requires_grad_(flags.requires_grad)
    if kept.content is not None:
        now = bytes_of(tensor)
        if not torch.equal(now, kept.content):
            now.copy_(kept.content)
    _put_hooks_back(tensor, flags)
    if with_grad and flags.is_leaf and tensor.grad is not flags.grad:
        tensor.grad = flags.grad


def _put_form_back(kept: KeptTensor, twin: torch.Tensor) -> None:
    assert kept.form is not None, "a twin has a form"
    storage = twin.untyped_storage()
    if storage.nbytes() != kept.form.storage_bytes:
        storage.resize_(kept.form.storage_bytes)
    kept.tensor.data = twin


def _put_hooks_back(tensor: torch.Tensor, flags: Flags) -> None:
    if tensor._backward_hooks is not flags.hooks:
        tensor._backward_hooks = flags.hooks
    if getattr(tensor, "_post_accumulate_grad_hooks", None) is not flags.accumulated_hooks:
        tensor._post_accumulate_grad_hooks = flags.accumulated_hooks


def what_differs(kept: KeptTensor, *, with_grad: bool) -> str:
    """Say in which respect a tensor is not what it was; empty if in none."""
    tensor = kept.tensor
    flags = flags_of(tensor, with_grad=with_grad)
    if kept.flags.is_leaf != flags.is_leaf:
        return "it became part of an autograd graph"
    if kept.flags.requires_grad != flags.requires_grad:
        return f"requires_grad was {kept.flags.requires_grad}, is {flags.requires_grad}"
    if kept.flags.grad is not flags.grad:
        return "has another gradient"
    if flags.hooks is not kept.flags.hooks:
        return "has other hooks"
    if flags.accumulated_hooks is not kept.flags.accumulated_hooks:
        return "has other hooks"
    return _difference_in_form(kept, form_of(tensor)) or _difference_in_content(kept)


def _difference_in_form(kept: KeptTensor, now: Form | None) -> str:
    was = kept.form
    if was is None or now is None or was == now:
        return ""
    for word in ("dtype", "shape", "strides"):
        old, new = getattr(was, word), getattr(now, word)
        if old != new:
            old, new = (tuple(each) if word != "dtype" else each for each in (old, new))
            return f"{word} was {old}, is {new}"
    return "lies in other memory" if kept.content is None or kept.twin is None else ""


def _difference_in_content(kept: KeptTensor) -> str:
    if kept.content is None:
        return ""
    now = bytes_of(kept.tensor)
    if now.numel() == kept.content.numel() and torch.equal(now, kept.content):
        return ""
    return "has other values"


def storages_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """List the storages that tensors lie in."""
    return {form.storage for tensor in tensors if (form := form_of(tensor)) is not None}
