"""Keeps linear calls that are put off, and the views of their results, until someone needs them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.errors import StrategyError
from memfit.losses.row_chunks import product_dtype_of
from memfit.strategies.linear_cross_entropy.logit_views import Head, Logits, View

STRATEGY = "linear-cross-entropy"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of user code, to be made later as it would have been made at once."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    device_type: str
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(
        cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str
    ) -> Self:
        """Note a call, and the autocast around it."""
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(func, args, kwargs, device_type, dtype)

    def make(self, *first: Tensor) -> Tensor:
        """Make the call, with what comes before the noted arguments."""
        is_on = self.autocast_dtype is not None
        autocast = torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=is_on)
        with torch.enable_grad(), autocast:
            return cast(Tensor, self.func(*first, *self.args, **self.kwargs))


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Family:
    """A linear call that is put off, and everything that stands for a view of its result."""

    head: Head
    product_dtype: torch.dtype
    num_rows: int
    versions: tuple[int, ...]
    members: list[weakref.ref[Member]] = field(default_factory=list)
    is_real: bool = False
    is_past: bool = False
    """Whether it is made of what ranks had gathered for a forward that is over."""

    def make_real(self) -> None:
        """Make the logits, and all views of them that are still in use.

        All at once: what is changed in place later is then changed as it would have been.
        """
        self.is_real = True
        for reference in self.members:
            member = reference()
            if member is not None:
                member.make_real()
        self.members.clear()


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Member:
    """What one tensor stands for."""

    family: Family
    rows: Tensor
    """The layer's input, rearranged as the logits would be; features last."""
    version: int
    class_dim: int
    dtype: torch.dtype
    is_log: bool = False
    call: Call | None
    parent: Member | None = None
    real: Tensor | None = None
    hooks: list[Any] = field(default_factory=list)
    """Told when backward begins, by sharded modules whose result this is."""

    @classmethod
    def first(cls, head: Head, call: Call, num_rows: int) -> Self:
        """Stand for a linear call's result."""
        dtype = product_dtype_of(head.hidden, head.weight)
        family = Family(head=head, product_dtype=dtype, num_rows=num_rows, versions=_versions(head))
        return cls(
            family=family,
            rows=head.hidden,
            version=head.hidden._version,
            class_dim=head.hidden.dim() - 1,
            dtype=dtype,
            call=call,
        )

    def seen_as(self, view: View, call: Call) -> Member:
        """Stand for a view of this."""
        self.check_inputs()
        rows = view.on_rows(self.rows)
        return Member(
            family=self.family,
            rows=rows,
            version=rows._version,
            class_dim=view.class_dim % rows.dim(),
            dtype=view.dtype,
            is_log=view.is_log,
            call=call,
            parent=self,
        )

    @property
    def logits(self) -> Logits:
        """Describe what this stands for."""
        shape = list(self.rows.shape[:-1])
        shape.insert(self.class_dim, self.family.head.num_classes)
        return Logits(
            shape=tuple(shape),
            class_dim=self.class_dim,
            dtype=self.dtype,
            device=self.rows.device,
            is_log=self.is_log,
        )

    def make_real(self) -> Tensor:
        """Make what this stands for, where it is not there yet."""
        if self.real is None:
            self.check_inputs()
            assert self.call is not None, "only what is real has forgotten its call"
            before = () if self.parent is None else (self.parent.make_real(),)
            self.real = self.call.make(*before)
            for hook in self.hooks:
                self.real.register_hook(hook)
            self.call = self.parent = None
        return self.real

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what this is computed from."""
        return self.rows, self.family.head.weight, self.family.head.bias

    def all_hooks(self) -> list[Any]:
        """Return the hooks of this and of what it is a view of."""
        before = [] if self.parent is None else self.parent.all_hooks()
        return [*before, *self.hooks]

    def check_time(self) -> None:
        """Refuse to make logits from what ranks had gathered for a forward that is over.

        Raises:
            StrategyError: if they are made of such.
        """
        if self.family.is_past and self.real is None:
            reason = (
                "logits are used after the loss was computed, when ranks have given the weight "
                "that makes them back. Use them inside the loss, or do without this strategy: "
                f"--forbid {STRATEGY}."
            )
            raise StrategyError(STRATEGY, reason)

    def values(self) -> Tensor:
        """Make what this stands for from its inputs, where autocast is not listening."""
        self.check_inputs()
        dtype = self.family.product_dtype
        rows, weight, bias = (None if each is None else each.to(dtype) for each in self.inputs)
        values = F.linear(cast(Tensor, rows), cast(Tensor, weight), bias).to(self.dtype)
        values = values.movedim(-1, self.class_dim)
        return torch.log_softmax(values, self.class_dim) if self.is_log else values

    def check_inputs(self) -> None:
        """Refuse to go on where an input has been changed since the call.

        Raises:
            StrategyError: if one has.
        """
        if self.version == self.rows._version and self.family.versions == _versions(
            self.family.head
        ):
            return
        reason = (
            "the input or the weight of the layer that makes the logits is changed in place before "
            "the loss is computed. Change a copy, or do without this strategy: "
            f"--forbid {STRATEGY}."
        )
        raise StrategyError(STRATEGY, reason)


def _versions(head: Head) -> tuple[int, ...]:
    """Count the changes in place of a layer's parameters so far."""
    return tuple(each._version for each in (head.weight, head.bias) if each is not None)
