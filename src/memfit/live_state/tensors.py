"""Keeps tensors: their content to the bit, their shape and storage, and their flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor

Copied = Callable[[list[torch.Tensor]], torch.Tensor]
"""Copies flat tensors of bytes, one after the other, into one."""


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
    hooks: Any
    late_hooks: Any
    """Of gradients that have been accumulated."""
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


def flags_of(tensor: torch.Tensor) -> Flags:
    """Read what a tensor says to autograd."""
    late_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return Flags(tensor.requires_grad, tensor._backward_hooks, late_hooks, tensor.is_leaf)


def has_content(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has bytes that can be read: fake ones and those on meta have none."""
    if type(tensor) is torch.Tensor:
        return tensor.layout is torch.strided and not tensor.is_meta
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not hasattr(tensor, "__tensor_flatten__")
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stretch of memory that a tensor lies in, as a flat tensor of bytes.

    It is empty where the storage is freed, as sharded parameters' is: torch would make it anew.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if tensor.numel() == 0:
        return flat
    size = tensor.element_size()
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in extents)
    storage = tensor.untyped_storage()
    begin, num_bytes = tensor.storage_offset() * size, (last + 1) * size
    if storage.nbytes() < begin + num_bytes:
        return flat
    return flat.set_(storage, begin, (num_bytes,), (1,))


@dataclass(slots=True)
class KeptTensor:
    """One tensor as it was."""

    tensor: torch.Tensor
    flags: Flags
    form: Form | None
    """None where it is not kept."""
    twin: torch.Tensor | None
    """The same memory under the same form; None for tensors without content."""
    version: int = 0
    """How often it had been written to, so far as autograd was told."""
    num_bytes: int = 0
    """Of its content, where that is kept."""
    content: torch.Tensor | None = None

    def with_content(self, content: torch.Tensor) -> KeptTensor:
        """Return the same with the bytes that it had."""
        return replace(self, content=content)


@dataclass(frozen=True, slots=True)
class KeptGrad:
    """A gradient as it was."""

    grad: torch.Tensor
    content: torch.Tensor | None

    @classmethod
    def of(cls, grad: torch.Tensor, copied: Copied | None) -> Self:
        """Keep a gradient as it is, with its values if something copies them and they are there."""
        if copied is None or not has_content(grad):
            return cls(grad, None)
        return cls(grad, copied([bytes_of(grad)]))

    def put_back(self) -> None:
        """Give a gradient the values that it had."""
        if self.content is not None and not self.has_same_values():
            bytes_of(self.grad).copy_(self.content)

    def has_same_values(self) -> bool:
        """Return whether a gradient has the values that it had."""
        if self.content is None:
            return True
        return torch.equal(bytes_of(self.grad), self.content.to(self.grad.device))


def keep(tensor: torch.Tensor, *, with_form: bool) -> KeptTensor:
    """Keep a tensor as it is, but for its content."""
    has = with_form and has_content(tensor)
    return KeptTensor(
        tensor,
        flags_of(tensor),
        form_of(tensor) if with_form else None,
        tensor.detach() if has else None,
        tensor._version if has and not tensor.is_inference() else 0,
    )


def put_back(kept: KeptTensor) -> None:
    """Make a tensor what it was.

    Raises:
        RuntimeError: if it cannot leave the autograd graph that it has become a part of, or if it
            was written to and its content was too large to be kept.
    """
    tensor, flags = kept.tensor, kept.flags
    if flags.is_leaf and not tensor.is_leaf:
        tensor.detach_()
    if kept.twin is not None and form_of(tensor) != kept.form:
        _put_form_back(kept, kept.twin)
    if tensor.is_leaf and tensor.requires_grad != flags.requires_grad:
        tensor.requires_grad_(flags.requires_grad)
    _put_hooks_back(tensor, flags)
    if kept.content is not None:
        now = bytes_of(tensor)
        if not torch.equal(now, content := kept.content.to(now.device)):
            now.copy_(content)
    elif _was_written(kept):
        msg = "its content is too large to be copied before every step"
        raise RuntimeError(msg)


def _was_written(kept: KeptTensor) -> bool:
    """Return whether autograd was told that a tensor without kept content was written to."""
    has = kept.twin is not None and not kept.tensor.is_inference()
    return has and kept.tensor._version != kept.version


def _put_form_back(kept: KeptTensor, twin: torch.Tensor) -> None:
    assert kept.form is not None, "a twin has a form"
    storage = twin.untyped_storage()
    if storage.nbytes() != kept.form.storage_bytes:
        storage.resize_(kept.form.storage_bytes)
    kept.tensor.data = twin


def _put_hooks_back(tensor: torch.Tensor, flags: Flags) -> None:
    if tensor._backward_hooks is not flags.hooks:
        tensor._backward_hooks = flags.hooks
    if getattr(tensor, "_post_accumulate_grad_hooks", None) is not flags.late_hooks:
        tensor._post_accumulate_grad_hooks = flags.late_hooks


def what_differs(kept: KeptTensor) -> str:
    """Say in which respect a tensor is not what it was; empty if in none."""
    tensor = kept.tensor
    flags = flags_of(tensor)
    if kept.flags.is_leaf != flags.is_leaf:
        return "it became part of an autograd graph"
    if kept.flags.requires_grad != flags.requires_grad:
        return f"requires_grad was {kept.flags.requires_grad}, is {flags.requires_grad}"
    if flags.hooks is not kept.flags.hooks:
        return "has other hooks"
    if flags.late_hooks is not kept.flags.late_hooks:
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
    if (was.storage_bytes == 0) != (now.storage_bytes == 0):
        return "its memory was given back" if was.storage_bytes else "has memory again"
    return "lies in other memory" if kept.content is None else ""


def _difference_in_content(kept: KeptTensor) -> str:
    if kept.content is None:
        return "was written to" if _was_written(kept) else ""
    now = bytes_of(kept.tensor)
    if now.numel() == kept.content.numel() and torch.equal(now, kept.content.to(now.device)):
        return ""
    return "has other values"


def storages_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """List the storages that tensors lie in."""
    return {form.storage for tensor in tensors if (form := form_of(tensor)) is not None}
