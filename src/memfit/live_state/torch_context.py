"""Autocast and random state around a computation, to be put back when it is done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """The states of torch's random generators: the CPU's, and those of the tensors' devices."""

    cpu: torch.Tensor
    devices: list[int]
    on_devices: list[torch.Tensor]

    @classmethod
    def here(cls, *tensors: torch.Tensor) -> Self:
        """Take the states as they are."""
        cpu = torch.get_rng_state()  # not the generator's own method: recordings see this one
        if not tensors or all(tensor.device.type == "cpu" for tensor in tensors):
            return cls(cpu=cpu, devices=[], on_devices=[])
        devices, on_devices = get_device_states(*tensors)
        return cls(cpu=cpu, devices=devices, on_devices=on_devices)

    def put_back(self, device_type: str) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.on_devices, device_type=device_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchContext:
    """What a computation depends on besides its arguments.

    Not kept: the random states of numpy and Python, and other modes that are active.
    """

    device_type: str
    autocast_dtype: torch.dtype | None
    """None where autocast is off."""
    random_states: RandomStates | None
    """None where the computation draws nothing."""

    @classmethod
    def here(cls, *tensors: torch.Tensor, draws: bool = True) -> Self:
        """Take what is around a computation on these tensors, all on one kind of device."""
        device_type = tensors[0].device.type
        is_enabled = torch.is_autocast_enabled(device_type)
        return cls(
            device_type=device_type,
            autocast_dtype=torch.get_autocast_dtype(device_type) if is_enabled else None,
            random_states=RandomStates.here(*tensors) if draws else None,
        )

    def autocast(self, *, cache_enabled: bool | None = None) -> torch.autocast:
        """Return autocast as it was."""
        return torch.autocast(
            self.device_type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=cache_enabled,
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put autocast and random state back for a while."""
        with self.autocast():
            if self.random_states is None:
                yield
                return
            states = self.random_states
            with torch.random.fork_rng(devices=states.devices, device_type=self.device_type):
                states.put_back(self.device_type)
                yield
