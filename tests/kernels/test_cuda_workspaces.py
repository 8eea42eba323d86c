"""The workspaces of cuBLAS and cuBLASLt, by card and torch version."""

from __future__ import annotations

import pytest

from memfit.figures import Certainty
from memfit.kernels.cuda.workspaces import (
    Product,
    cublas_workspace,
    cublas_workspace_bytes,
    lt_workspace_bytes,
    uses_lt,
)
from memfit.units import MIB

DEFAULT = 8_519_680
LARGE = 32 * MIB
MATRIX_AND_ACTIVATION = {"operator": "aten::_addmm_activation", "bias_shape": (512, 3072)}
LINEAR = {"left_shape": (512, 768), "right_shape": (768, 3072), "bias_shape": (3072,)}


@pytest.mark.parametrize(
    ("capability", "version", "config", "num_bytes"),
    [
        ((7, 5), (2, 11), None, DEFAULT),
        ((8, 9), (2, 14), None, DEFAULT),
        # 32 MiB on the cards that its version names.
        ((9, 0), (2, 6), None, LARGE),
        ((9, 0), (2, 13), None, LARGE),
        ((10, 0), (2, 11), None, DEFAULT),
        ((10, 0), (2, 12), None, LARGE),
        ((12, 0), (2, 13), None, LARGE),
        ((11, 0), (2, 13), None, DEFAULT),
        ((11, 0), (2, 14), None, LARGE),
        # The documented default, a small one, nothing, and what cannot be read.
        ((9, 0), (2, 13), ":4096:2:16:8", DEFAULT),
        ((9, 0), (2, 13), ":16:8", 128 * 1024),
        ((8, 0), (2, 13), ":0:0", 0),
        ((8, 0), (2, 13), "4 MiB", DEFAULT),
    ],
)
def test_cublas_gets_what_its_version_or_the_configuration_says(
    capability, version, config, num_bytes
):
    assert cublas_workspace_bytes(capability, version, config) == num_bytes


def test_workspaces_are_temporaries_from_2_15_on():
    assert cublas_workspace((8, 0), (2, 14)).kept
    assert not cublas_workspace((8, 0), (2, 15)).kept
    assert cublas_workspace((8, 0), (2, 15)).certainty is Certainty.GUESS


def test_lt_had_one_mebibyte_of_its_own_before_it_was_unified():
    early, later = lt_workspace_bytes((8, 0), (2, 8)), lt_workspace_bytes((8, 0), (2, 10))
    assert (early.added_bytes, early.kept) == (MIB, False)
    assert (later.added_bytes, later.kept) == (MIB, True)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_lt_of_2_11_holds_one_mebibyte_of_its_own_as_the_h200_says(capability):
    workspace = lt_workspace_bytes(capability, (2, 11))
    assert (workspace.added_bytes, workspace.kept) == (MIB, True)
    assert workspace.certainty is Certainty.TABLE


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


@pytest.mark.parametrize(
    ("version", "change", "is_lt", "why"),
    [
        ((2, 13), {"dtype": "bfloat16"}, True, "a linear layer with a bias"),
        ((2, 13), {"operator": "aten::mm"}, False, "no bias"),
        ((2, 13), {"beta": 0.5}, False, "a scaled bias"),
        ((2, 13), {"dtype": "complex64"}, False, "a dtype that cuBLASLt lacks"),
        ((2, 13), {"bias_shape": (512, 3072)}, False, "a whole matrix"),
        ((2, 13), {"bias_shape": (1,)}, False, "a broadcast number"),
        ((2, 13), {"is_bias_contiguous": False}, False, "a bias with holes"),
        ((2, 13), {"is_in_place": True}, False, "a result that is the bias"),
        ((2, 13), {"right_shape": (768, 1), "bias_shape": (1,)}, False, "one column"),
        ((2, 13), {"left_shape": (1, 768)}, False, "one row"),
        ((2, 9), {"left_shape": (1, 768)}, True, "one row was no obstacle before"),
        ((2, 9), {"bias_shape": (1, 3072)}, False, "leading ones"),
        ((2, 10), {"bias_shape": (1, 3072)}, True, "leading ones are fused"),
        ((2, 11), MATRIX_AND_ACTIVATION, True, "a matrix, with an activation"),
        ((2, 10), MATRIX_AND_ACTIVATION, False, "a matrix, with an activation"),
        ((2, 13), {"operator": "aten::_scaled_mm"}, True, "a scaled product"),
    ],
)
def test_linear_layers_go_through_lt_as_far_as_it_takes_them(version, change, is_lt, why):
    product = Product(**{"operator": "aten::addmm", "dtype": "float32", **LINEAR, **change})
    assert uses_lt(version, product) == is_lt, why
