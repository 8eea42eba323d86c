"""Every operator has a class, and every class a share of the roofline, with its source."""

from __future__ import annotations

import pytest
import torch

from memfit.cost.operator_classes import _NAMES, OperatorClass, class_of
from memfit.cost.operator_rates import achieved_share, achieved_shares

KINDS = ("cpu", "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_class_with_a_source(kind):
    shares = achieved_shares(kind)
    assert set(shares) == set(OperatorClass)
    assert all(len(fact.source) > 10 for fact in shares.values())
    assert all(0.01 <= fact.value <= 1.5 for fact in shares.values())


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_ordered_as_the_work_is(kind):
    """Sorting and drawing take many passes; arithmetic of each element takes one."""
    share = {each: achieved_share(kind, each) for each in OperatorClass}
    assert share[OperatorClass.SORTING] < share[OperatorClass.REDUCTION]
    assert share[OperatorClass.SORTING] < share[OperatorClass.COPY]
    assert share[OperatorClass.FUNCTION] <= share[OperatorClass.POINTWISE]
    assert share[OperatorClass.ATTENTION] <= share[OperatorClass.PRODUCT]
    assert share[OperatorClass.CONVOLUTION] <= share[OperatorClass.PRODUCT]


def test_each_named_operator_exists_and_has_one_class():
    names = [name for found in _NAMES.values() for name in found.split()]
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(torch.ops.aten, name)]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("addmm", OperatorClass.PRODUCT),
        ("_scaled_dot_product_flash_attention_backward", OperatorClass.ATTENTION),
        ("convolution_backward", OperatorClass.CONVOLUTION),
        ("_cudnn_rnn", OperatorClass.RECURRENT),
        ("cudnn_batch_norm_backward", OperatorClass.NORM),
        ("native_layer_norm", OperatorClass.NORM),
        ("_log_softmax", OperatorClass.SOFTMAX),
        ("sum", OperatorClass.REDUCTION),
        ("embedding_dense_backward", OperatorClass.INDEXING),
        ("_foreach_addcdiv_", OperatorClass.OPTIMIZER),
        ("_fused_adamw_", OperatorClass.OPTIMIZER),
        ("_fused_rms_norm", OperatorClass.NORM),
        ("_fused_rms_norm_backward", OperatorClass.NORM),
        ("_to_copy", OperatorClass.COPY),
        ("native_dropout", OperatorClass.RANDOM),
        ("gelu_backward", OperatorClass.FUNCTION),
        ("mul", OperatorClass.POINTWISE),
        ("somebody::own", OperatorClass.POINTWISE),
    ],
)
def test_an_operator_has_the_class_of_its_work(operator, expected):
    assert class_of(operator) is expected
