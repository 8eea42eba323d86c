"""How many centres an existing script may work through at a time, where it does not say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import memfit
from memfit.devices.catalogue import current_device_name
from memfit.devices.detect import free_memory_bytes
from memfit.errors import JobError
from memfit.losses import mixture_score_matching
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.losses import Kernels

_SHARE = 0.9
"""Of the memory that is free; the rest is for what the script does besides."""
_FEW = 4
_NUM_CHUNKS = 3
"""Every chunk but the first and the last takes what the second one takes."""
KernelsOf = Callable[[nn.Module, Tensor], "Kernels"]


class _Mixture(nn.Module):
    """A copy of the script's network, and the centres that it has already."""

    centres: Tensor

    def __init__(self, network: nn.Module, centres: Tensor) -> None:
        super().__init__()
        self.network = copy.deepcopy(network)
        self.register_buffer("centres", centres)


def fitting_chunk(
    network: nn.Module, centres: Tensor, samples: Tensor, kernels_of: KernelsOf
) -> int:
    """Return the most centres at a time with which a step fits into the memory that is free.

    Steps of a few chunks are predicted on a copy of the network, with an AdamW whose states are
    still to come. What a chunk takes grows linearly with it; the one that is found is predicted
    as well. All centres where the system does not say how much is free.

    Args:
        network: the script's own.
        centres: (K, D), on the device of training.
        samples: (B, D), those of a step.
        kernels_of: gives the kernels of a network at centres.

    Raises:
        JobError: if one centre at a time is too much.
    """
    free_bytes = _free_bytes(centres.device)
    if free_bytes is None:
        return len(centres)
    room_bytes = int(_SHARE * free_bytes)
    needed = partial(_needed_bytes, network, centres, samples, kernels_of)
    if (all_bytes := needed(len(centres))) <= room_bytes:
        return len(centres)
    least_bytes, more_bytes = needed(1), needed(1 + _FEW)
    if least_bytes > room_bytes:
        msg = (
            f"A step takes {format_bytes(least_bytes)} beside the weights with one centre at a "
            f"time and {format_bytes(all_bytes)} with all of them; {format_bytes(room_bytes)} are "
            f"to be had, nine tenths of what is free. Use fewer samples in a step than "
            f"{len(samples)}."
        )
        raise JobError(msg)
    chunk = 1 + int((room_bytes - least_bytes) * _FEW / max(1, more_bytes - least_bytes))
    chunk = min(chunk, len(centres) - 1)
    while chunk > 1 and needed(chunk) > room_bytes:
        chunk -= max(1, chunk // 10)
    return max(1, chunk)


def _needed_bytes(
    network: nn.Module, centres: Tensor, samples: Tensor, kernels_of: KernelsOf, chunk: int
) -> int:
    """Predict what a step takes beside weights, centres and samples, so many centres at a time."""
    some = centres[: _NUM_CHUNKS * chunk]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, _Mixture), "the job's model() gives a mixture"
        kernels = partial(kernels_of, model.network)
        return mixture_score_matching(kernels, model.centres, batch, chunk=chunk)

    job = memfit.Job(
        model=lambda: _Mixture(network, some),
        batch=lambda size: samples[torch.arange(size) % len(samples)],
        loss=loss,
        optimizer=torch.optim.AdamW,
        batch_size=len(samples),
        name="wpo-sgm",
    )
    device = current_device_name() if centres.device.type == "cuda" else "cpu"
    there = sum(map(_num_bytes, (*network.parameters(), *network.buffers(), some, samples)))
    return memfit.predict(job, device=device).peak_allocated_bytes - there


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has left for tensors."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
