"""CUDA's autocast lists, against the installed torch's own dispatcher."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from memfit.virtual.cuda.autocast import POLICIES, autocast_lists

INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])


def registered(operator: str) -> bool:
    """Return whether the installed torch has an autocast kernel for CUDA."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA")
    except RuntimeError:  # names that were declared but have no schema
        return False


def test_the_lists_are_exactly_what_the_installed_torch_registers():
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    assert autocast_lists(INSTALLED).operators() == {name for name in known if registered(name)}


def test_every_operator_has_one_policy():
    lists = autocast_lists(INSTALLED)
    for one, other in combinations(POLICIES, 2):
        assert not getattr(lists, one) & getattr(lists, other), (one, other)


@pytest.mark.parametrize(
    ("operator", "policy"),
    [
        ("aten::addmm", "lower_precision"),
        ("aten::scaled_dot_product_attention", "lower_precision"),
        ("aten::layer_norm", "fp32"),
        ("aten::pow.Tensor_Scalar", "fp32"),
        ("aten::pow.Tensor_Tensor_out", None),
        ("aten::softmax.int", "fp32_set_opt_dtype"),
        ("aten::norm.Scalar", "fp32_append_dtype"),
        ("aten::scatter_add", "promote"),
        ("aten::binary_cross_entropy", "banned"),
        ("aten::relu", None),
    ],
)
def test_an_operator_has_the_policy_of_its_list(operator, policy):
    assert autocast_lists((2, 13)).policy_of(operator) == policy


def test_rms_norm_joined_the_float32_list_in_2_12():
    assert autocast_lists((2, 11)).policy_of("aten::rms_norm") is None
    assert autocast_lists((2, 12, 1)).policy_of("aten::rms_norm") == "fp32"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_empty(policy):
    assert getattr(autocast_lists((2, 6)), policy)
