"""The workspaces of cuBLAS and cuBLASLt, by card and torch version."""

from __future__ import annotations

import pytest

from memfit.figures import Certainty
from memfit.kernels.cuda.workspaces import (
    Product,
    cublas_workspace,
    cublas_workspace_bytes,
    lt_workspace_bytes,
    parse_workspace_config,
    uses_lt,
)
from memfit.units import MIB

DEFAULT = 8_519_680
LARGE = 32 * MIB
LINEAR = {"left_shape": (512, 768), "right_shape": (768, 3072), "bias_shape": (3072,)}


@pytest.mark.parametrize(
    ("capability", "version", "num_bytes"),
    [
        ((7, 5), (2, 11), DEFAULT),
        ((8, 9), (2, 14), DEFAULT),
        ((9, 0), (2, 6), LARGE),
        ((9, 0), (2, 13), LARGE),
        ((10, 0), (2, 11), DEFAULT),
        ((10, 0), (2, 12), LARGE),
        ((12, 0), (2, 13), LARGE),
        ((11, 0), (2, 13), DEFAULT),
        ((11, 0), (2, 14), LARGE),
    ],
)
def test_cublas_gets_32_mib_on_the_cards_its_version_names(capability, version, num_bytes):
    assert cublas_workspace_bytes(capability, version) == num_bytes


def test_the_documented_default_configuration_equals_the_default():
    assert parse_workspace_config(":4096:2:16:8") == DEFAULT
    assert cublas_workspace_bytes((9, 0), (2, 13), ":4096:2:16:8") == DEFAULT


def test_a_small_configuration_is_taken_at_its_word():
    assert cublas_workspace_bytes((9, 0), (2, 13), ":16:8") == 128 * 1024


def test_a_configuration_that_cannot_be_read_leaves_the_default():
    assert parse_workspace_config("4 MiB") is None
    assert cublas_workspace_bytes((8, 0), (2, 13), "4 MiB") == DEFAULT


def test_a_zero_configuration_takes_nothing():
    assert cublas_workspace_bytes((8, 0), (2, 13), ":0:0") == 0


def test_workspaces_are_temporaries_from_2_15_on():
    assert cublas_workspace((8, 0), (2, 14)).kept
    assert not cublas_workspace((8, 0), (2, 15)).kept
    assert cublas_workspace((8, 0), (2, 15)).certainty is Certainty.GUESS


def test_lt_had_one_mebibyte_of_its_own_before_it_was_unified():
    early, later = lt_workspace_bytes((8, 0), (2, 8)), lt_workspace_bytes((8, 0), (2, 10))
    assert (early.added_bytes, early.kept) == (MIB, False)
    assert (later.added_bytes, later.kept) == (MIB, True)


def test_lt_of_2_11_holds_a_second_buffer_as_the_t4_readings_want_it():
    workspace = lt_workspace_bytes((7, 5), (2, 11))
    assert (workspace.added_bytes, workspace.kept) == (DEFAULT, True)
    assert workspace.certainty is Certainty.GUESS


@pytest.mark.parametrize("version", [(2, 12), (2, 13), (2, 14)])
def test_lt_adds_nothing_where_it_shares_the_buffer_of_cublas(version):
    workspace = lt_workspace_bytes((9, 0), version)
    assert workspace.shared_with_cublas
    assert (workspace.num_bytes, workspace.added_bytes) == (LARGE, 0)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (11, 0), (12, 1)])
@pytest.mark.parametrize("minor", range(5, 16))
def test_every_figure_names_its_source(capability, minor):
    for workspace in (
        cublas_workspace(capability, (2, minor)),
        lt_workspace_bytes(capability, (2, minor)),
    ):
        assert workspace.num_bytes > 0
        assert "pytorch" in workspace.source


def test_a_linear_layer_with_a_bias_goes_through_lt():
    assert uses_lt((2, 13), Product(operator="aten::addmm", dtype="bfloat16", **LINEAR))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"operator": "aten::mm"}, "no bias"),
        ({"beta": 0.5}, "a scaled bias"),
        ({"dtype": "complex64"}, "a dtype that cuBLASLt lacks"),
        ({"bias_shape": (512, 3072)}, "a whole matrix"),
        ({"bias_shape": (1,)}, "a broadcast number"),
        ({"is_bias_contiguous": False}, "a bias with holes"),
        ({"is_in_place": True}, "a result that is the bias"),
        ({"right_shape": (768, 1), "bias_shape": (1,)}, "one column"),
        ({"left_shape": (1, 768)}, "one row"),
    ],
)
def test_what_lt_does_not_take_goes_through_cublas(change, why):
    product = Product(**{"operator": "aten::addmm", "dtype": "float32", **LINEAR, **change})
    assert not uses_lt((2, 13), product), why


def test_a_bias_with_leading_ones_is_fused_from_2_10_on():
    product = Product(operator="aten::addmm", **{**LINEAR, "bias_shape": (1, 3072)})
    assert not uses_lt((2, 9), product)
    assert uses_lt((2, 10), product)


def test_a_single_row_was_no_obstacle_before_2_10():
    product = Product(operator="aten::addmm", **{**LINEAR, "left_shape": (1, 768)})
    assert uses_lt((2, 9), product)


def test_a_matrix_bias_goes_through_lt_only_with_an_activation():
    product = Product(operator="aten::_addmm_activation", **{**LINEAR, "bias_shape": (512, 3072)})
    assert uses_lt((2, 11), product)
    assert not uses_lt((2, 10), product)


def test_scaled_products_always_go_through_lt():
    assert uses_lt((2, 13), Product(operator="aten::_scaled_mm"))
