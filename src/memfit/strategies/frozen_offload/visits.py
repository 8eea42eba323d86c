"""Weights outside the device, and their visits while the block that they belong to computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import StrategyError
from memfit.session.forwards import is_recomputed_later
from memfit.session.host_tensors import HostMemory, give_memory
from memfit.session.spill import Spill
from memfit.trace.events import Category
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import changed_tensors
from memfit.trace.purposes import tell_purpose

STRATEGY = "frozen-offload"


class HostWeight:
    """A frozen parameter whose memory is outside the device, but for its visits there.

    The parameter stays the same object: what holds it, an optimizer or a ``state_dict``, finds its
    values wherever they lie.

    Args:
        parameter: no gradient is wanted of it.
        name: of the parameter, for messages.
        device: where it visits.
        host: gives its place.
        spill: counts what moves.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        name: str,
        device: torch.device,
        *,
        host: HostMemory,
        spill: Spill,
    ) -> None:
        self.name = name
        self._parameter, self._device = parameter, device
        self._host, self._spill = host, spill
        self._kept: torch.Tensor | None = None
        self._elsewhere: torch.Tensor | None = None
        self._num_visits = 0
        self._version = 0

    def leave(self) -> None:
        """Move the parameter's memory out, for good.

        Raises:
            StrategyError: if something besides the parameter holds on to that memory.
        """
        parameter = self._parameter
        with torch.no_grad():
            self._kept = kept = self._host.like(parameter)
            self._elsewhere = _as_data_of(parameter, kept)
            self._copy(kept, parameter)
        memory = StorageWeakRef(parameter.untyped_storage())
        offset = int(parameter.storage_offset())
        self._send()
        if memory.expired():
            return
        self._take_memory_back(memory, offset)
        reason = (
            f"something besides the model holds the memory of {self.name}, which would not be "
            "given back, nor follow its changes. Let go of it (a view, .data, a detached tensor), "
            "or name blocks without that weight."
        )
        raise StrategyError(STRATEGY, reason)

    def enter(self) -> None:
        """Bring the weight to the device, unless it is there.

        Raises:
            StrategyError: if gradients are wanted of it by now.
        """
        if self._parameter.requires_grad:
            reason = (
                f"{self.name} requires gradients by now, which would go to a copy that is thrown "
                "away. Close the run and start another with a plan made for it."
            )
            raise StrategyError(STRATEGY, reason)
        if self._num_visits == 0:
            self._bring()
        self._num_visits += 1

    def exit(self) -> None:
        """Give the device's memory back when the last of several visits ends."""
        self._num_visits -= 1
        if self._num_visits == 0:
            self._send()

    def visiting_storage(self) -> int:
        """Name the storage that the weight has on the device."""
        address: int = self._parameter.untyped_storage()._cdata
        return address

    def check_unchanged(self) -> None:
        """Refuse a forward that has written to the weight.

        Raises:
            StrategyError: if it has.
        """
        if self._parameter._version != self._version:
            raise StrategyError(STRATEGY, _writes(self.name))

    def come_back(self) -> None:
        """Bring the weight to the device for good."""
        if self._elsewhere is not None:
            self._bring()
            self._elsewhere = self._kept = None

    def _bring(self) -> None:
        elsewhere = self._elsewhere
        assert elsewhere is not None, "it has left before"
        # Evaluation may run under torch.inference_mode, whose tensors are no parameters' data.
        with torch.inference_mode(mode=False), torch.no_grad():
            visiting = torch.empty_strided(
                elsewhere.size(), elsewhere.stride(), dtype=elsewhere.dtype, device=self._device
            )
            self._copy(visiting, elsewhere)
            give_memory(self._parameter, visiting)
        tell_purpose(self._parameter, Category.PARAMETERS)
        self._spill.mark(self._parameter, is_elsewhere=False)
        self._version = self._parameter._version

    def _send(self) -> None:
        assert self._elsewhere is not None, "it has left before"
        with torch.inference_mode(mode=False), torch.no_grad():
            give_memory(self._parameter, self._elsewhere)
        self._spill.mark(self._parameter, is_elsewhere=True)

    def _take_memory_back(self, memory: StorageWeakRef, offset: int) -> None:
        """Have the parameter lie where it lay before, since that lives on."""
        parameter = self._parameter
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        with torch.no_grad():
            data = parameter.new_empty(0, device=self._device)
            data.set_(storage, offset, parameter.size(), parameter.stride())
            give_memory(parameter, data)
        self._spill.mark(parameter, is_elsewhere=False)
        self._elsewhere = self._kept = None

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


def _as_data_of(parameter: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host that a parameter can have as its data."""
    if isinstance(parameter, FakeTensor):
        return FakeTensor(parameter.fake_mode, kept, torch.device("cpu"))
    return kept
