"""Makes a recorder on the CPU or on a virtual card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from memfit.devices.spec import CUDA, Device
from memfit.kernels.cpu import CpuKernels
from memfit.kernels.cuda.card import Card
from memfit.trace.recorder import Recorder
from memfit.virtual.cuda.kernels import CudaKernels
from memfit.virtual.process_group import current_placement, shapes_asked_unseen
from memfit.virtual.tensors import VirtualTensors, virtual_tensors


def card_of(device: Device | None, torch_version: tuple[int, int] | None = None) -> Card | None:
    """Describe a catalogue GPU as a virtual card; None for the CPU."""
    if device is None or device.kind != CUDA:
        return None
    major, _, minor = (device.compute_capability or "8.0").partition(".")
    count = device.facts.get("num_multiprocessors")
    workspace = device.facts.get("cublas_workspace_bytes")
    return Card(
        title=device.title,
        memory_bytes=device.memory_bytes,
        capability=(int(major), int(minor)),
        torch_version=torch_version or installed_torch_version(),
        num_multiprocessors=int(count.value) if count else None,
        cublas_workspace_bytes=int(workspace.value) if workspace else None,
    )


def installed_torch_version() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def recording_on(
    card: Card | None,
    *,
    disguised: bool = True,
    make_mode: Callable[..., VirtualTensors] = VirtualTensors,
    beside: Callable[[torch.Tensor], None] | None = None,
) -> Iterator[tuple[Recorder, VirtualTensors]]:
    """Record everything inside, on a card or on the CPU; return the recorder and the fake mode.

    Args:
        card: the GPU that ``cuda`` means inside; None for the CPU.
        disguised: have libraries that treat fake tensors specially take their usual path.
        make_mode: makes the fake mode, given whether it ``has_card``.
        beside: told of the tensors that lie on the host beside a card.
    """
    placement = current_placement()
    has_gloo = placement is not None and card is None
    hidden = CpuKernels(has_gloo=has_gloo) if card is None else CudaKernels(card)
    recorder = Recorder(hidden=hidden, beside=beside)
    with (
        virtual_tensors(card, disguised=disguised, make_mode=make_mode) as mode,
        recorder,
        shapes_asked_unseen(recorder.paused),
    ):
        if card is None:
            yield recorder, mode
            return
        with patch.object(torch.cuda, "empty_cache", recorder.release_cache):
            yield recorder, mode
