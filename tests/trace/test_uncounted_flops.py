"""Operators that torch's counter leaves out are counted by their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from memfit.trace.events import Phase
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import describe


class Counted(OperatorMode):
    """Add up the operations of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def _dispatch(self, func, args, kwargs):
        out = func(*args, **kwargs)
        found = describe(func, args, kwargs, out, Phase.FORWARD)
        if found is not None:
            self.flops[found.name] = self.flops.get(found.name, 0) + found.num_flops
        return out


def test_attention_on_the_processor_counts_as_that_on_a_gpu():
    query, key, value = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (64, 64, 64))
    with Counted() as counted:
        F.scaled_dot_product_attention(query, key, value).sum().backward()
    name = "_scaled_dot_product_flash_attention_for_cpu"
    shapes = query.shape, key.shape, value.shape
    assert counted.flops[name] == sdpa_flop_count(*shapes)
    expected = sdpa_backward_flop_count(query.shape, *shapes)
    assert counted.flops[f"{name}_backward"] == expected


@pytest.mark.parametrize(("kind", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_a_recurrent_layer_multiplies_its_weights_with_every_step(kind, num_gates):
    layer = kind(24, 40)
    with Counted() as counted:
        layer(torch.randn(7, 5, 24))
    names = [name for name in counted.flops if "rnn" in name]
    found = sum(counted.flops[name] for name in names) if names else sum(counted.flops.values())
    expected = 2 * 7 * 5 * num_gates * 40 * (24 + 40)
    assert found == pytest.approx(expected, rel=0.02)
