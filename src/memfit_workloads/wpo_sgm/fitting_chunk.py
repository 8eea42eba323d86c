"""How many centres an existing script may work through at a time, where it does not say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import memfit
from memfit.devices.catalogue import current_device_name
from memfit.devices.detect import free_memory_bytes
from memfit.losses import mixture_score_matching
from memfit.strategies import CATALOGUE, LossChunking

if TYPE_CHECKING:
    from memfit.losses import Kernels

_SHARE = 0.9
"""Of the memory that is free; the rest is for what the script does besides."""
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

    All of them where the system does not say how much that is.

    memfit plans the step on a copy of the network, with an AdamW whose states are still to come.

    Args:
        network: the script's own.
        centres: (K, D), on the device of training.
        samples: (B, D), those of a step.
        kernels_of: gives the kernels of a network at centres.

    Raises:
        NoPlanFitsError: if one centre at a time is too much.
    """

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, _Mixture), "the job's model() gives a mixture"
        return mixture_score_matching(partial(kernels_of, model.network), model.centres, batch)

    job = memfit.Job(
        model=lambda: _Mixture(network, centres),
        batch=lambda size: samples[torch.arange(size) % len(samples)],
        loss=loss,
        optimizer=torch.optim.AdamW,
        batch_size=len(samples),
        name="wpo-sgm",
    )
    is_cuda = centres.device.type == "cuda"
    room_bytes = _free_bytes(centres.device)
    if room_bytes is None:
        return len(centres)
    there = sum(map(_num_bytes, (*network.parameters(), *network.buffers(), centres, samples)))
    plan = memfit.plan(
        job,
        device=current_device_name() if is_cuda else "cpu",
        budget=there + int(_SHARE * room_bytes),
        budget_of="allocated",
        forbid=_others(),
    )
    chunks = [each.num_candidates for each in plan.strategies if isinstance(each, LossChunking)]
    return min([*chunks, len(centres)])


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has left for tensors."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _others() -> Sequence[str]:
    """Name all strategies that a script's own loop does not apply."""
    return [each.name for each in CATALOGUE if each is not LossChunking]
