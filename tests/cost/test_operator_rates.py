"""Every operator has a class, and every class a share of what a device reaches, with its source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memfit.cost.operator_classes import _NAMES, OperatorClass, class_of
from memfit.cost.operator_times import OperatorRates, operation_seconds
from memfit.devices.catalogue import catalogued_device
from memfit.trace.events import Operation, Phase

KINDS = ("cpu", "cuda")
BANDWIDTH = "memory_bandwidth_bytes_per_second"


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_class_with_a_source(kind):
    rates = OperatorRates.of(kind)
    facts = [rates.product_share, rates.copy_share, *rates.classes.values()]
    assert set(rates.classes) == set(OperatorClass)
    assert all(len(fact.source) > 10 for fact in facts)
    assert all(0.01 <= fact.value <= 1.0 for fact in facts)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_ordered_as_the_work_is(kind):
    """Sorting takes many passes, arithmetic of each element one; a product is what is tuned most."""
    share = {each: fact.value for each, fact in OperatorRates.of(kind).classes.items()}
    slow = OperatorClass.SORTING
    assert all(share[slow] < share[each] for each in OperatorClass if each is not slow)
    assert share[OperatorClass.FUNCTION] <= share[OperatorClass.POINTWISE]
    for each in (OperatorClass.ATTENTION, OperatorClass.CONVOLUTION, OperatorClass.RECURRENT):
        assert share[each] <= share[OperatorClass.PRODUCT]


def test_a_measured_rate_is_reached_and_one_of_a_data_sheet_is_not():
    device = catalogued_device("h200")
    copied = Operation("clone", Phase.FORWARD, "float32", 0, 10**12)
    measured = replace(device.facts[BANDWIDTH], certainty="exact")
    calibrated = replace(device, facts={**device.facts, BANDWIDTH: measured})
    launch = device.value("launch_seconds")
    of_sheet = operation_seconds(copied, device) - launch
    reached = operation_seconds(copied, calibrated) - launch
    assert reached == pytest.approx(of_sheet * OperatorRates.of("cuda").copy_share.value)


@pytest.mark.parametrize(("operator", "ratio"), [("native_layer_norm", 1.0), ("add", 0.5)])
def test_a_norm_gains_nothing_from_half_the_bytes_on_a_card(operator, ratio):
    device = catalogued_device("h200")
    whole = Operation(operator, Phase.FORWARD, "float32", 0, 10**12)
    half = replace(whole, dtype="bfloat16", moved_bytes=whole.moved_bytes // 2)
    found = operation_seconds(half, device) / operation_seconds(whole, device)
    assert found == pytest.approx(ratio, rel=1e-3)


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
        ("cudnn_batch_norm_backward", OperatorClass.CHANNEL_NORM),
        ("native_batch_norm", OperatorClass.CHANNEL_NORM),
        ("native_group_norm", OperatorClass.CHANNEL_NORM),
        ("native_layer_norm", OperatorClass.NORM),
        ("_log_softmax", OperatorClass.SOFTMAX),
        ("sum", OperatorClass.REDUCTION),
        ("embedding_dense_backward", OperatorClass.INDEXING),
        ("_foreach_addcdiv_", OperatorClass.OPTIMIZER),
        ("_foreach_copy_", OperatorClass.OPTIMIZER),
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
