"""Weights outside the device, and their visits while the block that they belong to computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import MemfitWarning, StrategyError
from memfit.session.forwards import is_recomputed_later
from memfit.session.host_tensors import HostMemory, give_memory
from memfit.session.spill import Spill
from memfit.trace.events import Category
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import changed_tensors
from memfit.trace.purposes import tell_purpose

STRATEGY = "frozen-offload"
_HOST = torch.device("cpu")


class HostWeight:
    """A frozen parameter whose memory is outside the device; a copy of it visits there.

    The parameter stays the same object: what holds it, an optimizer or a ``state_dict``, finds its
    values. During a visit its modules hold the copy in its place. It must be another tensor, for
    checkpointing keeps what a recomputation saves as it is, without ``detach``, where no gradient
    is wanted of it (``_recomputation_hook`` in torch/utils/checkpoint.py, torch 2.13): backward
    would find the parameter's own memory, wherever that is by then.

    Args:
        parameter: no gradient is wanted of it.
        name: of the parameter, for messages.
        holders: the modules that hold it, and under which names.
        host: gives its place.
        spill: counts what moves.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        holders: Sequence[tuple[torch.nn.Module, str]],
        *,
        host: HostMemory,
        spill: Spill,
    ) -> None:
        self.name = name
        self._parameter, self._holders = parameter, holders
        self._host, self._spill = host, spill
        self._device = parameter.device
        self._kept: torch.Tensor | None = None
        self._visiting: torch.nn.Parameter | None = None
        self._num_visits = 0
        self._version = 0

    def leave(self, device: torch.device) -> None:
        """Move the parameter's memory out, for good.

        Args:
            device: where copies of it visit, and where it comes back to.

        Raises:
            StrategyError: if something besides the parameter holds on to that memory.
        """
        parameter, self._device = self._parameter, device
        former = StorageWeakRef(parameter.untyped_storage())
        offset, before = int(parameter.storage_offset()), parameter.device
        with torch.no_grad():
            self._kept = kept = self._host.like(parameter)
            self._copy(kept, parameter)
            give_memory(parameter, _as_data_of(parameter, kept, _HOST))
        self._spill.mark(parameter, is_elsewhere=True)
        if former.expired():
            return
        self._lie_where_before(former, offset, before)
        reason = (
            f"something besides the model holds the memory of {self.name}, which would not be "
            "given back, nor follow its changes. Let go of it (a view, .data, the graph of a "
            "loss), or name blocks without that weight."
        )
        raise StrategyError(STRATEGY, reason)

    def enter(self) -> None:
        """Bring a copy to the device, unless one is there.

        Raises:
            StrategyError: if gradients are wanted of it by now.
        """
        if self._parameter.requires_grad:
            reason = (
                f"{self.name} requires gradients by now, which would go to a copy that is thrown "
                "away. Close the run and start another with a plan made for it."
            )
            raise StrategyError(STRATEGY, reason)
        if self._visiting is None:
            self._visiting = visiting = self._on_device()
            self._version = visiting._version
            tell_purpose(visiting, Category.PARAMETERS)
            self._replace(self._parameter, visiting)
        self._num_visits += 1

    def exit(self) -> None:
        """Let go of the copy when the last of several visits ends."""
        self._num_visits -= 1
        if self._num_visits == 0 and self._visiting is not None:
            self._replace(self._visiting, self._parameter)
            self._visiting = None

    def visiting_storage(self) -> int:
        """Name the storage of the copy."""
        assert self._visiting is not None, "it has entered before"
        address: int = self._visiting.untyped_storage()._cdata
        return address

    def check_unchanged(self) -> None:
        """Refuse a forward that has written to the copy.

        Raises:
            StrategyError: if it has.
        """
        if self._visiting is not None and self._visiting._version != self._version:
            raise StrategyError(STRATEGY, _writes(self.name))

    def come_back(self) -> None:
        """Bring the parameter to the device for good, if there is room; else warn that it stays."""
        if self._kept is None:
            return
        try:
            made = self._on_device()
        except torch.OutOfMemoryError:
            msg = (
                "Frozen weights stay in the host's memory after the end of frozen-offload, as the "
                "device has no room for all of them. Move the model to the CPU to compute with it."
            )
            warnings.warn(msg, MemfitWarning, stacklevel=2)
            return
        with torch.no_grad():
            give_memory(self._parameter, made.data)
        self._spill.mark(self._parameter, is_elsewhere=False)
        self._kept = None

    def _on_device(self) -> torch.nn.Parameter:
        """Copy the values that the parameter has now to the device."""
        parameter = self._parameter
        # Evaluation may run under torch.inference_mode, whose tensors cannot be saved later on.
        with torch.inference_mode(mode=False), torch.no_grad():
            made = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=parameter.dtype, device=self._device
            )
            self._copy(made, parameter)
        return torch.nn.Parameter(made, requires_grad=False)

    def _replace(self, before: torch.nn.Parameter, after: torch.nn.Parameter) -> None:
        """Have modules hold another tensor; those that have been given another are left alone."""
        for module, key in self._holders:
            if module._parameters.get(key) is before:
                setattr(module, key, after)  # recurrent layers note it in their lists, too

    def _lie_where_before(self, former: StorageWeakRef, offset: int, device: torch.device) -> None:
        """Have the parameter lie where it lay before, since that lives on."""
        parameter = self._parameter
        storage = torch.UntypedStorage._new_with_weak_ptr(former.cdata)
        with _disable_current_modes(), torch.no_grad():
            data = torch.empty(0, dtype=parameter.dtype, device=storage.device)
            data.set_(storage, offset, parameter.size(), parameter.stride())
        give_memory(parameter, _as_data_of(parameter, data, device))
        self._spill.mark(parameter, is_elsewhere=False)
        self._kept = None

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and wait for it: the host's side may be written to right after."""
        self._spill.note_waited(source.nbytes, is_on_disk=self._host.is_on_disk)
        if not (destination.is_meta or isinstance(source, FakeTensor) or source.is_meta):
            # Modes that count what operators return would count the host's tensors.
            with _disable_current_modes():
                destination.copy_(source)


class VisitedBlock:
    """The forward of a block whose frozen weights are on the device only while it computes.

    It is recomputed in backward, as autograd would otherwise hold on to what visits.

    Args:
        name: of the block.
        forward: its own.
        recomputed: makes a function of another that computes it again in backward.
        weights: visit for it.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        recomputed: Callable[[Callable[..., Any]], Callable[..., Any]],
        weights: Sequence[HostWeight],
    ) -> None:
        self._name = name
        self._forward = forward
        self._weights = weights
        self._num_visits = 0
        self._visit_again = recomputed(self._visit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block, and once more in backward unless something sees to that already."""
        if torch.is_grad_enabled() and not is_recomputed_later():
            return self._visit_again(*args, **kwargs)
        return self._visit(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Leave the copy of a block its own forward, since its weights are in ordinary memory."""
        return copy.deepcopy(self._forward, memo)

    def _visit(self, *args: Any, **kwargs: Any) -> Any:
        self._num_visits = number = self._num_visits + 1
        with ExitStack() as stack:
            for weight in self._weights:
                weight.enter()
                stack.callback(weight.exit)
            # Writes that autograd is not told of are looked for now and then, as that takes time.
            is_watched = not number & (number - 1)
            with _WritesRefused(self._weights) if is_watched else nullcontext():
                result = self._forward(*args, **kwargs)
            for weight in self._weights:
                weight.check_unchanged()
            return result


class _WritesRefused(OperatorMode):
    """Refuse operators that write to weights which visit, also through ``.data`` and views."""

    def __init__(self, weights: Sequence[HostWeight]) -> None:
        super().__init__()
        self._names = {weight.visiting_storage(): weight.name for weight in weights}

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for written in changed_tensors(func, args, kwargs):
            if (name := self._names.get(written.untyped_storage()._cdata)) is not None:
                raise StrategyError(STRATEGY, _writes(name))
        return func(*args, **kwargs)


def _writes(name: str) -> str:
    return (
        f"the forward writes to {name}, of which it has a copy that is thrown away. Name blocks "
        "without that weight, or keep what changes in a buffer."
    )


def _as_data_of(parameter: torch.Tensor, data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor that a parameter can have as its data, on a device; a fake one's is fake."""
    if isinstance(parameter, FakeTensor):
        return FakeTensor(parameter.fake_mode, data, device)
    return data
