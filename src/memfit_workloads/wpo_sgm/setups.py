"""For existing scripts: trainers with the document's names, around a factor network of their own.

A factor network maps centres (K, D) to packed lower triangles (K, D (D + 1) / 2), row by row; the
precision of a kernel is L L^T + stab I. All trainers compute the same objective, that of the whole
mixture, however the centres are cut.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memfit.errors import JobError, MemfitWarning
from memfit.losses import (
    Kernels,
    mixture_means,
    mixture_score_matching,
    score_matching_of,
    softmax_mean_of_parts,
)

from .precisions import StabilisedPrecision
from .triangles import triangle_places, triangle_size

_Network = Callable[[Tensor], Tensor]
_CENTRES_OF: WeakKeyDictionary[nn.Module, weakref.ref[Tensor]] = WeakKeyDictionary()
"""The centres that the trainer of a network was set up with; not kept alive by this."""


class ChunkedTrainer:
    """Compute the loss a number of centres at a time; its memory is that of one chunk.

    Without ``chunk_size`` the first loss finds the largest one with which a step, and AdamW's
    states, fit into the memory that is free then; it is in ``chunk_size`` from there on.
    """

    def __init__(
        self, factornet: nn.Module, centers: Tensor, chunk_size: int | None = None
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            msg = f"chunk_size is {chunk_size}; needed is at least 1, or None to have it found."
            raise JobError(msg)
        _warn_of_parts(factornet, centers, chunk_size)
        self.factornet = factornet
        self.centers = centers
        self.chunk_size = chunk_size
        self._places = triangle_places(centers.shape[1], centers.device)

    def compute_loss(self, samples: Tensor, stab: float = 1e-6) -> Tensor:
        """Return the score matching loss at samples (B, D), to call ``backward()`` on.

        Raises:
            JobError: if ``stab`` is not above 0, the network's outputs are no triangles, or a chunk
                was to be found and one centre at a time is too much.
        """
        kernels = _kernels_of(self.factornet, self._places, stab)
        if self.chunk_size is None:
            from .fitting_chunk import fitting_chunk  # it imports the planner

            self.chunk_size = fitting_chunk(
                self.factornet,
                self.centers,
                samples,
                lambda network, centers: _kernels_of(network, self._places, stab)(centers),
            )
        return mixture_score_matching(kernels, self.centers, samples, chunk=self.chunk_size)


class GradientAccumulationTrainer(ChunkedTrainer):
    """Work through the centres in a number of parts, whose gradients add up."""

    def __init__(self, factornet: nn.Module, centers: Tensor, accumulation_steps: int) -> None:
        if accumulation_steps < 1:
            msg = f"accumulation_steps is {accumulation_steps}; needed is at least 1."
            raise JobError(msg)
        # As many parts as asked for, nearly alike; never more, and never empty.
        super().__init__(factornet, centers, -(-len(centers) // accumulation_steps))
        self.accumulation_steps = accumulation_steps

    def training_step(
        self, samples: Tensor, optimizer: torch.optim.Optimizer, stab: float = 1e-6
    ) -> Tensor:
        """Run one step of the optimizer, and return the loss before it."""
        optimizer.zero_grad()
        loss = self.compute_loss(samples, stab)
        loss.backward()
        optimizer.step()
        return loss.detach()


class ModelParallelTrainer:
    """Split the centres over devices of this process; there is one network, and its copies follow.

    Each device works through its centres, backward on all of them at once. For several processes
    there is ``memfit train wpo-sgm --strategy model_parallel``.
    """

    def __init__(
        self,
        factornet: nn.Module,
        centers: Tensor,
        device_ids: Sequence[int | str | torch.device],
        chunk_size: int | None = None,
    ) -> None:
        if not 0 < len(device_ids) <= len(centers):
            msg = (
                f"There are {len(centers)} centres for {len(device_ids)} devices; needed are one "
                "device at least, and a centre for each."
            )
            raise JobError(msg)
        devices = [_device(each) for each in device_ids]
        self.factornet = factornet.to(devices[0])
        self.chunk_size = chunk_size
        parts = centers.tensor_split(len(devices))
        self.centers_per_device = [
            part.to(device) for part, device in zip(parts, devices, strict=True)
        ]
        self._places = [triangle_places(centers.shape[1], device) for device in devices]

    def compute_loss(self, samples: Tensor, stab: float = 1e-6) -> Tensor:
        """Return the score matching loss at samples (B, D), on the first device.

        Raises:
            JobError: if ``stab`` is not above 0, or the network's outputs are no triangles.
        """
        first = self.centers_per_device[0].device
        found = []
        for centers, places in zip(self.centers_per_device, self._places, strict=True):
            network, parameters = _copied_to(self.factornet, centers.device)
            mean = mixture_means(
                _kernels_of(network, places, stab),
                centers,
                samples.to(centers.device),
                parameters=parameters,
                chunk=min(self.chunk_size or len(centers), len(centers)),
                is_part=len(self.centers_per_device) > 1,
            )
            found.append(
                type(mean)(mean.log_sum_exp.to(first), tuple(m.to(first) for m in mean.means))
            )
        return score_matching_of(softmax_mean_of_parts(found))

    __call__ = compute_loss


setup_chunked_training = ChunkedTrainer
"""Set up training with so many centres at a time."""
setup_gradient_accumulation_training = GradientAccumulationTrainer
"""Set up training with the centres in so many parts."""


def setup_model_parallel_training(
    factornet: nn.Module,
    centers: Tensor,
    device_ids: Sequence[int | str | torch.device],
    args: Any,
) -> tuple[ModelParallelTrainer, torch.optim.Optimizer]:
    """Set up training with the centres split over devices, and an AdamW for the one network.

    Args:
        factornet: the network; it is moved to the first device.
        centers: (K, D).
        device_ids: numbers of GPUs, or devices.
        args: has ``lr``, and may have ``weight_decay`` and ``chunk_size``, the centres at a time on
            each device.
    """
    trainer = ModelParallelTrainer(
        factornet, centers, device_ids, chunk_size=getattr(args, "chunk_size", None)
    )
    optimizer = torch.optim.AdamW(
        trainer.factornet.parameters(),
        lr=args.lr,
        weight_decay=getattr(args, "weight_decay", 1e-4),
    )
    return trainer, optimizer


def _device(name: int | str | torch.device) -> torch.device:
    """Return a device that is there.

    Raises:
        JobError: if it is a GPU that is not.
    """
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        msg = (
            f"device_ids has GPU {device.index or 0}, and torch sees {num_gpus} here. Name those "
            "that are there, or 'cpu'; on one device setup_chunked_training does the same."
        )
        raise JobError(msg)
    return device


def _warn_of_parts(network: nn.Module, centers: Tensor, chunk_size: int | None) -> None:
    """Warn of a network that is given parts of its centres one after the other."""
    earlier = _CENTRES_OF.get(network)
    before = None if earlier is None else earlier()
    _CENTRES_OF[network] = weakref.ref(centers)
    if before is None or before is centers:
        return
    chunk = "" if chunk_size is None else f" with args.chunk_size = {chunk_size}"
    warnings.warn(
        f"This network was set up with {len(before)} other centres before, and has {len(centers)} "
        "now. Each trainer trains the mixture of its own centres, so the losses of parts do not "
        "add up to that of the whole mixture. To split centres over devices exactly, use "
        f"setup_model_parallel_training(factornet, centers, device_ids, args){chunk}.",
        MemfitWarning,
        stacklevel=3,
    )


def _copied_to(network: nn.Module, device: torch.device) -> tuple[_Network, list[Tensor]]:
    """Return a network as it is on another device, part of the same graph, and its parameters."""
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    copies = {name: tensor.to(device) for name, tensor in own.items()}

    def call(centers: Tensor) -> Tensor:
        called: Tensor = torch.func.functional_call(network, copies, (centers,))
        return called

    parameters = [
        copies[name] for name, tensor in network.named_parameters() if tensor.requires_grad
    ]
    return call, parameters


def _kernels_of(network: _Network, places: Tensor, stab: float) -> Callable[[Tensor], Kernels]:
    """Make kernels from a network's packed triangles.

    Raises:
        JobError: if ``stab`` is not above 0.
    """
    if not stab > 0:
        msg = f"stab is {stab}; needed is a number above 0, which keeps precisions invertible."
        raise JobError(msg)

    def kernels(centers: Tensor) -> Kernels:
        packed = network(centers)
        num_dimensions = centers.shape[1]
        needed = (len(centers), triangle_size(num_dimensions))
        if tuple(packed.shape) != needed:
            msg = (
                f"The factor network gave {tuple(packed.shape)} for {len(centers)} centres of "
                f"{num_dimensions} dimensions; needed are packed lower triangles, {needed}."
            )
            raise JobError(msg)
        return StabilisedPrecision(num_dimensions, stab).kernels(centers, packed, places)

    return kernels
