"""The forward of a module that computes on the host: tensors cross to it, and what it gives back.

Copies are ``Tensor.to``, so autograd sends gradients back over the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.errors import StrategyError
from memfit.session.spill import Spill
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import changed_tensors

STRATEGY = "host-modules"
HOST = torch.device("cpu")
_SHORT = (torch.bfloat16, torch.float16)
_HOLDS_NO_TENSOR = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SCALED = "the scale of float16 is copied to the host's gradients without waiting for the copy"
"""Source: ``_MultiDeviceReplicator`` in torch/amp/grad_scaler.py, torch 2.13: ``non_blocking``."""
_GATHERED = "Name a module around it that gives tensors, or leave it out of modules."


class Crossing:
    """Copy tensors between the device and the host, and count the bytes.

    Args:
        device: where the rest of the model computes.
        spill: counts what moves.
    """

    def __init__(self, device: torch.device, spill: Spill) -> None:
        self.device = device
        self._spill = spill
        self._is_computing = False

    @property
    def is_computing(self) -> bool:
        """Return whether a module is computing on the host, and those inside it with it."""
        return self._is_computing

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have modules inside compute where their caller does, in the types of their weights.

        Autocast of the device leaves the host's tensors alone, so it is off here.
        """
        self._is_computing = True
        try:
            off = partial(torch.autocast, self.device.type, enabled=False)
            with off() if self.is_short else nullcontext():
                yield
        finally:
            self._is_computing = False

    @property
    def is_short(self) -> bool:
        """Return whether the device computes under autocast."""
        return torch.is_autocast_enabled(self.device.type)

    def check_precision(self) -> None:
        """Refuse to train in float16, whose gradients are scaled.

        Raises:
            StrategyError: under autocast in float16, by whomever.
        """
        if (
            torch.is_grad_enabled()
            and self.is_short
            and torch.get_autocast_dtype(self.device.type) is torch.float16
        ):
            reason = f"{SCALED}. Train in bfloat16, or leave this strategy out."
            raise StrategyError(STRATEGY, reason)

    def lies_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host already."""
        return tensor.device.type == HOST.type

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host; what autocast has shortened becomes float32 there."""
        moved = self._copied(tensor, HOST)
        return moved.float() if self.is_short and moved.dtype in _SHORT else moved

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to the device."""
        return self._copied(tensor, device)

    def _copied(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # its tensors do not tell whether they were changed
            with torch.inference_mode(mode=False), torch.no_grad():
                made = self._copy(tensor, device)
        else:
            made = self._copy(tensor, device)
        # A gradient comes back as large as what it is of.
        num_copies = 2 if made.requires_grad else 1
        self._spill.note_waited(num_copies * tensor.nbytes, is_on_disk=False)
        return made

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)


class HostForward:
    """Compute a module on the host: inputs are copied there, and what it gives is copied back.

    A tensor that is given several times is copied once, and an input that comes out as it went in
    is the caller's own again. Tensors that were on the host before stay there.

    Args:
        name: of the module.
        module: whose forward it is; its weights are on the host.
        crossing: copies.
    """

    def __init__(self, name: str, module: torch.nn.Module, crossing: Crossing) -> None:
        self._name = name
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._crossing = crossing
        self._num_visits = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on the host.

        Raises:
            StrategyError: if the forward changes what it is given, or gives what shares memory with
                it: the caller has another copy of both. Under autocast in float16 as well.
        """
        if self._crossing.is_computing:
            return self._forward(*args, **kwargs)
        self._crossing.check_precision()
        self._num_visits = number = self._num_visits + 1
        visit = _Visit(self._name, self._crossing, (args, kwargs))
        args, kwargs = visit.moved
        # Writes that autograd is not told of are looked for now and then, as that takes time.
        is_watched = not number & (number - 1)
        with visit.writes_refused() if is_watched else nullcontext(), self._crossing.computing():
            result = self._forward(*args, **kwargs)
        visit.check_unchanged()
        return visit.brought_back(result, self._module.buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Leave the copy of a module its own forward, which computes where its weights are."""
        return copy.deepcopy(self._forward, memo)


class _Visit:
    """What one call was given, what it has of that on the host, and the way back."""

    def __init__(self, name: str, crossing: Crossing, given: Any) -> None:
        self._name = name
        self._crossing = crossing
        self._device = crossing.device
        self._here: dict[int, torch.Tensor] = {}
        """The caller's tensors, by their copies on the host or by themselves."""
        leaves, spec = tree_flatten(given)
        copies: dict[int, torch.Tensor] = {}
        self._leaves = [self._taken(leaf, copies) for leaf in leaves]
        self._spec: TreeSpec = spec
        self._copies = list(copies.values())
        self._versions = [each._version for each in self._copies]
        self.moved: Any = tree_unflatten(self._leaves, spec)

    def _taken(self, leaf: Any, copies: dict[int, torch.Tensor]) -> Any:
        """Copy what lies on the device, each tensor once."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._crossing.lies_on_host(leaf):
            self._here[id(leaf)] = leaf
            return leaf
        if id(leaf) not in copies:
            self._device = leaf.device
            copies[id(leaf)] = made = self._crossing.to_host(leaf)
            self._here[id(made)] = leaf
        return copies[id(leaf)]

    @contextmanager
    def writes_refused(self) -> Iterator[None]:
        """Refuse operators that write to the copies, also through ``.data`` and views."""
        with _WritesRefused(self._name, {_storage_of(each) for each in self._copies}):
            yield

    def check_unchanged(self) -> None:
        """Refuse a forward that has changed what it was given.

        Raises:
            StrategyError: if it has.
        """
        if [each._version for each in self._copies] != self._versions:
            raise StrategyError(STRATEGY, _writes(self._name))
        leaves, spec = tree_flatten(self.moved)
        if spec != self._spec or [*map(id, leaves)] != [*map(id, self._leaves)]:
            reason = (
                f"the forward of {self._name} changes a list or a dictionary that it is given, "
                "and it has a copy of it on the host. Have it return what is new, or leave it "
                "out of modules."
            )
            raise StrategyError(STRATEGY, reason)

    def brought_back(self, result: Any, buffers: Iterator[torch.Tensor]) -> Any:
        """Copy what the module gives to the device.

        Raises:
            StrategyError: if it shares memory with what was given or with buffers, or may hold
                tensors where they are not looked for.
        """
        leaves, spec = tree_flatten(result)
        lent = {_storage_of(each) for each in (*self._copies, *buffers)}
        brought: dict[int, torch.Tensor] = {}
        return tree_unflatten([self._given_back(leaf, lent, brought) for leaf in leaves], spec)

    def _given_back(self, leaf: Any, lent: set[int], brought: dict[int, torch.Tensor]) -> Any:
        if isinstance(leaf, _HOLDS_NO_TENSOR):
            return leaf
        if not isinstance(leaf, torch.Tensor):
            reason = (
                f"{self._name} gives a {type(leaf).__name__}, in which tensors are not looked for: "
                f"in tuples, lists, dictionaries and what torch knows to flatten they are. "
                f"{_GATHERED}"
            )
            raise StrategyError(STRATEGY, reason)
        if id(leaf) in self._here:
            return self._here[id(leaf)]
        if not self._crossing.lies_on_host(leaf):
            return leaf
        if _storage_of(leaf) in lent:
            reason = (
                f"{self._name} gives a view of what it is given, or one of its buffers: a change "
                f"in place would reach a copy of it alone. {_GATHERED}"
            )
            raise StrategyError(STRATEGY, reason)
        if id(leaf) not in brought:
            brought[id(leaf)] = self._crossing.to_device(leaf, self._device)
        return brought[id(leaf)]


class _WritesRefused(OperatorMode):
    """Refuse operators that write to some storages.

    Args:
        name: of the module that computes.
        storages: of what it was given.
    """

    def __init__(self, name: str, storages: set[int]) -> None:
        super().__init__()
        self._name = name
        self._storages = storages

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for written in changed_tensors(func, args, kwargs):
            if _storage_of(written) in self._storages:
                raise StrategyError(STRATEGY, _writes(self._name))
        return func(*args, **kwargs)


def _writes(name: str) -> str:
    return (
        f"the forward of {name} changes a tensor that it is given, and it has a copy of it on the "
        "host: its caller would not see the change. Have it work on a tensor of its own, or leave "
        "it out of modules."
    )


def _storage_of(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
