"""What is said of cuDNN's workspaces, beside those that a card took."""

from __future__ import annotations

import pytest
from accuracy.workspaces import FILES, near_shares

from memfit.kernels.cuda.convolution_choice import Pass


@pytest.fixture(scope="module", params=FILES)
def shares(request):
    return near_shares(request.param)


def test_most_workspaces_are_near_those_of_the_card(shares):
    half, single = shares["larger kernels, half"], shares["larger kernels, TF32"]
    assert min(half[Pass.FORWARD], half[Pass.INPUT_GRADIENT]) > 0.88
    assert min(single[Pass.FORWARD], single[Pass.INPUT_GRADIENT]) > 0.7
    assert min(shares["1 x 1, half"][which] for which in Pass) > 0.75


def test_the_high_end_is_seldom_passed(shares):
    total = sum(each["convolutions"] for each in shares.values())
    below = sum(each["convolutions"] * each["below_high"] for each in shares.values())
    assert below / total > 0.95
