"""Positives as pairs give what padded lists give, and take less where lists differ in length."""

from typing import Any

import pytest
import torch
from tests.losses.test_losses import (
    EXACT,
    NUM_CANDIDATES,
    direct_loss,
    loss_and_gradients,
    make_inputs,
)
from torch import Tensor

from memfit.errors import JobError
from memfit.influence.one_to_many import one_to_many_losses
from memfit.losses import PositivePairs, one_to_many_bce
from memfit.losses.positives import listed


def pairs_of(positives: Tensor) -> PositivePairs:
    """Write padded lists as pairs in a mixed order, paddings and repetitions included."""
    rows = torch.arange(len(positives))[:, None].expand_as(positives).reshape(-1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    return PositivePairs(rows[order], positives.reshape(-1)[order])


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, NUM_CANDIDATES, NUM_CANDIDATES + 50])
def test_pairs_give_the_definition(chunk: int | None, label_smoothing: float) -> None:
    *inputs, positives = make_inputs()
    expected = loss_and_gradients(direct_loss(inputs, positives, label_smoothing), tuple(inputs))
    loss = one_to_many_bce(
        *inputs, pairs_of(positives), label_smoothing=label_smoothing, chunk=chunk
    )
    for found, wanted in zip(loss_and_gradients(loss, tuple(inputs)), expected, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("chunk", [1, 4, 1024])
def test_losses_by_row_are_those_of_padded_lists(chunk: int) -> None:
    *inputs, positives = make_inputs()
    given: dict[str, Any] = {"label_smoothing": 0.1, "chunk": chunk}
    wanted = one_to_many_losses(*inputs, positives, **given)
    found = one_to_many_losses(*inputs, pairs_of(positives), **given)
    torch.testing.assert_close(found, wanted, **EXACT)
    weights = torch.arange(1.0, 1 + len(wanted), dtype=wanted.dtype)
    expected = loss_and_gradients((wanted * weights).sum(), tuple(inputs))
    for grad, want in zip(
        loss_and_gradients((found * weights).sum(), tuple(inputs)), expected, strict=True
    ):
        torch.testing.assert_close(grad, want, **EXACT)


def test_no_positive_at_all_is_every_target_0() -> None:
    *inputs, positives = make_inputs()
    none = PositivePairs(*torch.empty((2, 0), dtype=torch.int64))
    expected = direct_loss(inputs, torch.full_like(positives, -1), 0.0)
    for chunk in (None, 5):
        found = one_to_many_bce(*inputs, none, chunk=chunk)
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("place", [("rows", 5), ("rows", -1), ("candidates", NUM_CANDIDATES)])
def test_pairs_of_what_is_not_there_are_errors(chunk: int | None, place: tuple[str, int]) -> None:
    *inputs, positives = make_inputs()
    pairs = pairs_of(positives)
    getattr(pairs, place[0])[4] = place[1]
    pairs.candidates[4] = max(pairs.candidates[4], 0)
    with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
        one_to_many_bce(*inputs, pairs, chunk=chunk)


@pytest.mark.parametrize(
    "pairs",
    [
        PositivePairs(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
        PositivePairs(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)),
        PositivePairs(torch.zeros(3, dtype=torch.int64), torch.zeros(3)),
        PositivePairs(
            torch.zeros((3, 1), dtype=torch.int64), torch.zeros((3, 1), dtype=torch.int64)
        ),
    ],
)
def test_pairs_of_wrong_shapes_are_named(pairs: PositivePairs) -> None:
    *inputs, _ = make_inputs()
    with pytest.raises(JobError, match=r"positives pairs of .* needed are query"):
        one_to_many_bce(*inputs, pairs)
    with pytest.raises(JobError, match="positives pairs of"):
        one_to_many_losses(*inputs, pairs)


def test_both_forms_hold_the_same_candidates() -> None:
    positives = make_inputs()[3]
    candidates = torch.arange(NUM_CANDIDATES).expand(len(positives), -1)
    wanted = torch.tensor(
        [[each in row for each in range(NUM_CANDIDATES)] for row in positives.tolist()]
    )
    for given in (positives, pairs_of(positives)):
        torch.testing.assert_close(listed(given).holds(candidates, NUM_CANDIDATES), wanted)
