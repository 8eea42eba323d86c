"""Claims of exactness are judged by what is true of a case, each half for itself."""

from __future__ import annotations

import pytest
from exactness import case as case_module
from exactness import scoring
from exactness import truth as truths


def case(**declared):
    return case_module.Case(**{"name": "some", "build": lambda: None, "half": "blind", **declared})


def row(declared, numerics, reason=""):
    truth = truths.Truth(
        adds=declared.adds,
        draws=declared.draws,
        effects=False,
        leaves_same=True,
        recompute_unsafe=False,
        reads_values=False,
        recompute_error=0.0,
        cuts=(truths.Cut(counts=(4,) * 4, weights="shares"),),
    )
    return scoring.row(declared, scoring.Claim(numerics=numerics, reason=reason), truth)


@pytest.mark.parametrize(
    ("declared", "numerics", "expected"),
    [
        ({}, "exact", "proved"),
        ({}, "different", "too timid"),
        ({}, "unproved", "not known"),
        ({"adds": "no"}, "exact", "false"),
        ({"adds": "no"}, "same-in-law", "false"),
        ({"adds": "no"}, "different", "refuted"),
        ({"adds": "groups"}, "exact", "proved"),
        ({"adds": "sum"}, "exact", "sum"),
        ({"adds": "sum"}, "different", "refuted"),
        ({"draws": "per-sample"}, "exact", "false"),
        ({"draws": "per-sample"}, "same-in-law", "proved"),
        ({"draws": "shared"}, "same-in-law", "false"),
        ({"leaves": "different"}, "exact", "false"),
        ({"leaves": "scratch"}, "exact", "proved"),
        ({"adds": "sum", "leaves": "different"}, "exact", "false"),
    ],
)
def test_a_claim_is_judged_by_what_is_true(declared, numerics, expected) -> None:
    assert scoring.verdict(case(**declared), numerics) == expected


def test_each_half_is_counted_for_itself() -> None:
    rows = [
        row(case(name="kept"), "exact"),
        row(case(name="coupled", adds="no"), "exact"),
        row(case(name="unknown", adds="no"), "unproved", "a mask"),
        row(case(name="other", half="public"), "different"),
    ]

    found = scoring.summary(rows)

    assert found["blind"]["num_cases"] == 3
    assert found["blind"]["num_kept_proved"] == 1
    assert found["blind"]["false"] == ["coupled"]
    assert found["blind"]["not_known"] == {"unknown": "a mask"}
    assert found["public"]["too_timid"] == ["other"]


def test_the_error_of_a_piece_that_failed_is_no_number() -> None:
    (written,) = scoring.as_json([row(case(), "exact")])

    assert written["worst_error"] is None
