"""An optimizer's states outside the device, and their visits for the update of one parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.session.host_tensors import HostMemory
from memfit.session.spill import Spill
from memfit.strategies.single_steps import step_alone


class HostStates:
    """Keep an optimizer's large states on the host; ``optimizer.state`` holds them there.

    Args:
        optimizer: of torch.optim.
        host: gives their places.
        spill: counts what moves.
        min_tensor_bytes: what is smaller stays on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: HostMemory,
        spill: Spill,
        min_tensor_bytes: int,
    ) -> None:
        self._optimizer = optimizer
        self._host = host
        self._spill = spill
        self._min_tensor_bytes = min_tensor_bytes
        self._kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._held_back: Mapping[str, Any] = {}
        self._hooks: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept on the host."""
        return not any(self._kept.values())

    def take_hold(self, former: HostStates | None) -> None:
        """Move all states there are; those that an earlier plan has left on the host stay there."""
        if former is not None and type(former._host) is type(self._host):
            self._host = former._host
            self._kept, former._kept = former._kept, {}
        self._hooks = [
            self._optimizer.register_load_state_dict_pre_hook(self._before_load),
            self._optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        with torch.no_grad():
            for parameter in list(self._optimizer.state):
                self._send(parameter)

    def stop(self) -> None:
        """Leave the states where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def come_back(self) -> None:
        """Bring everything back for good."""
        for parameter in list(self._kept):
            with torch.no_grad():
                self._bring(parameter)
            del self._kept[parameter]

    def update(self) -> None:
        """Update every parameter that has a gradient, one after another."""
        try:
            for group in list(self._optimizer.param_groups):
                for parameter in list(group["params"]):
                    if parameter.grad is not None:
                        with self.visiting(parameter):
                            step_alone(self._optimizer, group, parameter)
        finally:
            if torch.cuda.is_initialized():  # copies to the host may be under way
                torch.cuda.current_stream().synchronize()

    @contextmanager
    def visiting(self, parameter: torch.Tensor) -> Iterator[None]:
        """Have a parameter's states on the device inside this block.

        Where that fails, they stay there as it has left them, until the next update.
        """
        with torch.no_grad():
            self._bring(parameter)
        yield
        with torch.no_grad():
            self._send(parameter)

    def _bring(self, parameter: torch.Tensor) -> None:
        state = self._optimizer.state.get(parameter, {})
        for name, kept in self._kept.get(parameter, {}).items():
            if name in state and _own_part(state[name]) is kept:
                _put(state, name, self._on_device(parameter, kept))

    def _on_device(self, parameter: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_strided(
            kept.size(), kept.stride(), dtype=kept.dtype, device=parameter.device
        )
        self._copy(tensor, kept)
        return tensor

    def _send(self, parameter: torch.Tensor) -> None:
        state = self._optimizer.state.get(parameter, {})
        for name, value in list(state.items()):
            own = _own_part(value)
            if self._is_large(own) and own is not self._kept.get(parameter, {}).get(name):
                _put(state, name, self._on_host(parameter, name, own))

    def _on_host(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        places = self._kept.setdefault(parameter, {})
        kept = places.get(name)
        if kept is None or not _is_alike(kept, value):
            kept = places[name] = self._host.like(value)
        self._copy(kept, value)
        return kept

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy behind all that the device was asked for; what has no values is counted alone."""
        num_bytes = source.numel() * source.element_size()
        self._spill.note_waited(num_bytes, is_on_disk=self._host.is_on_disk)
        if not (destination.is_meta or isinstance(source, FakeTensor) or source.is_meta):
            # Modes that count what operators return would count the host's tensors.
            with _disable_current_modes():
                destination.copy_(source, non_blocking=True)

    def _is_large(self, value: object) -> bool:
        """Return whether a state is moved: a plain tensor that fills its memory, and no scalar."""
        return (
            type(value) in {torch.Tensor, FakeTensor}
            and isinstance(value, torch.Tensor)
            and value.dim() > 0  # optimizers look at their counts of steps when they are loaded
            and value.layout is torch.strided
            and not (value.is_conj() or value.is_neg())
            and value.numel() * value.element_size() >= self._min_tensor_bytes
            and _fills_its_memory(value)
        )

    def _before_load(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Hold large states back, which would all be moved to the device at once."""
        self._held_back = state_dict
        rest = {
            number: {name: value for name, value in held.items() if not self._is_large(value)}
            if isinstance(held, dict)
            else held
            for number, held in state_dict["state"].items()
        }
        return {**state_dict, "state": rest}

    @torch.no_grad()
    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Put loaded states in their places on the host, in the type that torch gives them."""
        loaded, self._held_back = self._held_back, {}
        numbers = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            held = loaded["state"].get(number, {})
            for name, value in held.items() if isinstance(held, dict) else ():
                if self._is_large(value):
                    cast = value.to(parameter.dtype) if parameter.is_floating_point() else value
                    optimizer.state[parameter][name] = self._on_host(parameter, name, cast)


def _own_part(value: Any) -> Any:
    """Return the part of a state that lies on this rank: all of it, but for a shard."""
    return value._local_tensor if _is_shard(value) else value


def _put(state: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Have a state lie in another tensor; a shard stays the shard that it is."""
    if _is_shard(state[name]):
        state[name]._local_tensor = tensor
    else:
        state[name] = tensor


def _is_shard(value: object) -> bool:
    """Return whether a state is spread over ranks, as those of parameters under FSDP2 are."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds
    return module is not None and isinstance(value, module.DTensor)


def _is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors lie in memory in the same way."""
    return (first.dtype, first.size(), first.stride()) == (
        second.dtype,
        second.size(),
        second.stride(),
    )


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one place in memory for each element, and none in between."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
