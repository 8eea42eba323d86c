"""What takes sequences of different lengths computes as torch does, and has the right shapes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from memfit.virtual import sequences
from memfit.virtual.assumptions import Assumptions
from memfit.virtual.tensors import virtual_tensors
from memfit.virtual.with_values import with_values

LENGTHS = torch.tensor([9, 6, 6, 2])


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(
    ("make", "cell"),
    [
        (nn.LSTM, sequences._lstm_cell),
        (partial(nn.LSTM, proj_size=3), sequences._lstm_cell),
        (nn.GRU, sequences._gru_cell),
        (nn.RNN, partial(sequences._simple_cell, torch.tanh)),
        (partial(nn.RNN, nonlinearity="relu"), partial(sequences._simple_cell, torch.relu)),
    ],
)
def test_packed_layers_compute_what_torch_computes(
    make, cell, has_biases, is_bidirectional, num_layers
):
    layer = make(5, 7, num_layers, bias=has_biases, bidirectional=is_bidirectional)
    packed = pack_padded_sequence(torch.randn(4, 9, 5), LENGTHS, batch_first=True)
    out, finals = layer(packed)
    finals = finals if isinstance(finals, tuple) else (finals,)
    states = tuple(torch.zeros_like(each) for each in finals)
    given = states if len(states) > 1 else states[0]
    args = (packed.data, packed.batch_sizes, given, layer._flat_weights, has_biases)
    found = sequences._run(
        cell, packed.batch_sizes.tolist(), (*args, num_layers, 0.0, True, is_bidirectional)
    )
    assert torch.equal(found[0], out.data)
    assert all(torch.equal(*pair) for pair in zip(found[1:], finals, strict=True))


@pytest.mark.slow
def test_fake_sequences_have_the_shapes_of_real_ones():
    def run():
        layer = nn.GRU(5, 7, batch_first=True)
        packed = pack_padded_sequence(torch.zeros(4, 9, 5), LENGTHS, batch_first=True)
        out, lengths = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=11)
        log_probs = out.log_softmax(-1).transpose(0, 1)
        targets = torch.ones(4, 2, dtype=torch.long)
        losses = {
            kind: nn.functional.ctc_loss(
                log_probs, targets, LENGTHS, torch.tensor([2, 2, 1, 1]), reduction=kind
            ).shape
            for kind in ("none", "mean", "sum")
        }
        return out.shape, lengths.tolist(), losses

    real = run()
    with virtual_tensors(None, make_mode=with_values(Assumptions())):
        assert run() == real
