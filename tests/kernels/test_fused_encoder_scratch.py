"""Encoder layers and attention that run as one operator take what the allocator reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.kernels.cpu import scratch_bytes
from memfit.observe.allocator_events import AllocatorWatch

FUSED = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
SLACK_BYTES = 64


class Comparison(TorchDispatchMode):
    """Compare what fused operators take with what is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with AllocatorWatch() as watch:
            out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in FUSED:
            outs = out if isinstance(out, tuple) else (out,)
            kept = sum(each.numel() * each.element_size() for each in outs if each is not None)
            found = scratch_bytes(func, args, kwargs or {}, out)
            self.pairs.append((found, watch.highest_growth_bytes() - kept))
        return out


def compare(module, *args, **kwargs):
    with torch.no_grad(), Comparison() as seen:
        module.eval()(*args, **kwargs)
    ((predicted, measured),) = seen.pairs
    assert predicted == pytest.approx(measured, abs=SLACK_BYTES)


PADDED = torch.arange(33).expand(4, 33) > 20
CAUSAL = torch.ones(33, 33, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("norm_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    ("hidden", "heads", "masks"),
    [
        (256, 2, {}),
        (32, 8, {}),
        (32, 8, {"src_key_padding_mask": PADDED}),
        (32, 4, {"src_mask": CAUSAL}),
        (1024, 4, {"src_mask": CAUSAL, "src_key_padding_mask": PADDED}),
    ],
)
def test_an_encoder_layer(norm_first, hidden, heads, masks):
    layer = nn.TransformerEncoderLayer(32, heads, hidden, batch_first=True, norm_first=norm_first)
    compare(layer, torch.randn(4, 33, 32), **masks)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize("weights", [False, True], ids=["alone", "with weights"])
def test_attention(mask, weights):
    x = torch.randn(4, 33, 64)
    attention = nn.MultiheadAttention(64, 8, batch_first=True)
    compare(attention, x, x, x, key_padding_mask=mask, need_weights=weights)
