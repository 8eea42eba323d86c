"""Ranks that are there take what was predicted of them."""

from __future__ import annotations

import shutil

import pytest
from bench_ranks import CASES, row_of, title

CHOSEN = ("fsdp2: perceptron, 2 ranks", "ddp: decoder, views, 2 ranks")


def test_steps_have_names_of_their_own():
    titles = [title(case) for case in CASES]
    assert len({*titles}) == len(titles)
    assert {*CHOSEN} <= {*titles}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="the counter needs a C compiler")
@pytest.mark.parametrize("case", [each for each in CASES if title(each) in CHOSEN], ids=title)
def test_ranks_over_gloo_take_what_was_predicted(case):
    """A rank that waits for another gives up after a minute, so nothing hangs."""
    row = row_of(case)
    assert abs(row["error_fraction"]) < 0.02
    for free, late in zip(row["free_peak_bytes"], row["late_peak_bytes"], strict=True):
        assert free <= 1.02 * late
