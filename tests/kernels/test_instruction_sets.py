"""The rules for convolutions are those of the processor's instruction set, and can be asked of any."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from memfit.kernels.cpu_onednn_3_12 import convolutions
from memfit.kernels.cpu_onednn_3_12.convolutions import avx2, avx512
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution

NARROW = Convolution(
    batch=4,
    num_in=20,
    num_out=2,
    groups=1,
    image=(16, 16),
    result=(16, 16),
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    width=4,
    has_bias=False,
)


@pytest.fixture(autouse=True)
def _asked_anew():
    convolutions.has_avx512.cache_clear()
    yield
    convolutions.has_avx512.cache_clear()


@pytest.mark.parametrize(("kernels", "block"), [(avx2, 8), (avx512, 16)])
def test_channels_lie_in_blocks_of_what_a_register_holds(kernels, block):
    [found] = kernels.forward_layouts(NARROW, 1, is_last=False)
    num_in = 3 * 8 if block == 8 else 2 * 16
    assert found.image == 4 * num_in * 16 * 16 * 4
    assert found.result == 4 * block * 16 * 16 * 4
    assert found.weight == block * num_in * 9 * 4


@pytest.mark.parametrize("limit", ["avx2", "SSE41", "AVX2_VNNI"])
def test_a_limit_set_for_onednn_is_heeded(monkeypatch, limit):
    with patch.object(torch.cpu, "_is_avx512_supported", lambda: True):
        assert convolutions.kernels_here() is avx512
        convolutions.has_avx512.cache_clear()
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert convolutions.kernels_here() is avx2


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_sums_of_threads_grow_with_threads_alone(is_last, num_threads):
    [alone] = avx2.weight_layouts(NARROW, 1, is_last=is_last)
    [shared] = avx2.weight_layouts(NARROW, num_threads, is_last=is_last)
    assert replace(shared, scratchpad=0) == replace(alone, scratchpad=0)
    assert shared.scratchpad >= alone.scratchpad


def test_what_no_kernel_takes_is_unfolded_in_blocks():
    padded = replace(NARROW, padding=(3, 3), result=(20, 20), num_in=512)
    [found] = avx2.forward_layouts(padded, 1, is_last=False)
    assert not found.image
    assert 0 < found.scratchpad < 512 * 9 * 20 * 20 * 4
