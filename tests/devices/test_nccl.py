"""What NCCL takes is a table of readings with bounds, and never nothing where ranks talk."""

from __future__ import annotations

import pytest

from memfit.devices.catalogue import load_device
from memfit.devices.nccl import nccl_memory
from memfit.figures import Certainty
from memfit.units import MIB

A100, H100, T4 = (load_device(name) for name in ("a100-40gb", "h100-80gb", "t4"))


@pytest.mark.parametrize(
    ("device", "num_ranks", "mib", "certainty"),
    [
        (A100, 2, 544, Certainty.TABLE),
        (A100, 4, 688, Certainty.TABLE),
        (A100, 64, 688, Certainty.GUESS),
        (H100, 8, 1060, Certainty.TABLE),
        (H100, 16, 1060, Certainty.GUESS),
        (T4, 2, 544, Certainty.GUESS),
    ],
)
def test_a_reading_stands_for_its_architecture_and_ranks(device, num_ranks, mib, certainty):
    found = nccl_memory(device, [num_ranks])
    assert (found.num_bytes, found.certainty) == (mib * MIB, certainty)
    assert found.low_bytes == found.num_bytes // 2
    assert found.high_bytes == 1600 * MIB
    assert "https://github.com/NVIDIA/nccl/issues/" in found.source


def test_each_group_may_have_a_communicator_and_the_default_group_may_do_without():
    found = nccl_memory(A100, [4, 2, 2])
    assert found.num_bytes == (688 + 2 * 544) * MIB
    assert found.low_bytes == 544 * MIB
    assert found.high_bytes == 3 * 1600 * MIB


def test_who_talks_to_nobody_needs_none():
    assert nccl_memory(A100, []) is None
    assert nccl_memory(A100, [1]) is None
