"""What is said of two peaks: verdicts, modules of one kind, the moment that is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from memfit.peak_changes.comparison import Comparison, Tolerance, Verdict, default_tolerance
from memfit.peak_changes.moments import KnownLine, LineBlocks, Moment, StepMoments
from memfit.peak_changes.parts import PartChange, kind_of, part_changes, rest_of, rolled_up
from memfit.peak_changes.saved import FIRST_STEP, STEADY_STEP
from memfit.peak_changes.sides import Kind, Side
from memfit.reports.compare_wording import notes

LINES = [
    KnownLine(source_line="net.py:3", function="f", code="y = self.act(x)"),
    KnownLine(source_line="net.py:8", function="g", code="optimizer.step()"),
]


def make_moment(phase: str, held: Mapping[str, int], line_of_peak: str = "net.py:3") -> Moment:
    """Make a moment at which lines hold bytes, a block each."""
    blocks = [
        LineBlocks(
            source_line=line, module="h.0", category="temporaries", num_bytes=n, num_blocks=1
        )
        for line, n in held.items()
    ]
    return Moment(phase=phase, source_line=line_of_peak, blocks=blocks)


def make_side(peak_bytes: int, *moments: Moment, **changes: Any) -> Side:
    """Make a side of one peak."""
    known: dict[str, Any] = {
        "source": "a.json",
        "title": "net.py:job",
        "kind": Kind.PREDICTED,
        "device": "cpu",
        "peaks": {FIRST_STEP: peak_bytes, STEADY_STEP: peak_bytes},
        "figures": {"process_bytes": 2 * peak_bytes},
        "moments": StepMoments(lines=LINES, moments=moments) if moments else None,
    }
    return Side(**{**known, **changes})


def compare(before: Side, after: Side, **limits: Any) -> Comparison:
    return Comparison(before=before, after=after, **{"tolerance": Tolerance(), **limits})


@pytest.mark.parametrize(
    ("before", "after", "tolerance", "verdict", "is_regression"),
    [
        (100, 100, Tolerance(), Verdict.SAME, False),
        (100, 99, Tolerance(), Verdict.LOWER, False),
        (100, 101, Tolerance(), Verdict.HIGHER, True),
        (100, 101, Tolerance(num_bytes=1), Verdict.WITHIN_TOLERANCE, False),
        (1000, 1010, Tolerance(fraction=0.01), Verdict.WITHIN_TOLERANCE, False),
        (1000, 1011, Tolerance(fraction=0.01), Verdict.HIGHER, True),
        (0, 1, Tolerance(fraction=0.01), Verdict.HIGHER, True),
    ],
)
def test_a_peak_above_the_tolerance_is_a_regression(
    before, after, tolerance, verdict, is_regression
) -> None:
    found = compare(make_side(before), make_side(after), tolerance=tolerance)

    assert (found.verdict, found.is_regression) == (verdict, is_regression)


def test_a_budget_that_neither_fits_is_no_regression_unless_it_is_given() -> None:
    side = make_side(100, fits=False, budget_bytes=50)

    assert not compare(side, side).is_regression
    assert compare(side, side, budget_bytes=50, budget_of="allocated").is_regression
    assert compare(side, side, budget_bytes=150, budget_of="process").is_regression
    assert compare(make_side(100, fits=True), side).is_regression


def test_only_a_measured_side_makes_room_for_noise() -> None:
    predicted, measured = make_side(1000), make_side(1000, kind=Kind.MEASURED)

    assert default_tolerance(predicted, predicted).bytes_above(1000) == 0
    assert default_tolerance(predicted, measured).bytes_above(1000) == 10


def test_a_peak_that_moved_is_compared_where_it_lies_now() -> None:
    before = make_side(
        90, make_moment("forward", {"net.py:3": 80}), make_moment("optimizer", {"net.py:8": 90})
    )
    after = make_side(
        95, make_moment("forward", {"net.py:3": 95}), make_moment("optimizer", {"net.py:8": 90})
    )
    found = compare(before, after)

    assert found.lines is not None
    assert [(line.code, line.change_bytes) for line in found.lines] == [("y = self.act(x)", 15)]
    assert any("from optimizer (net.py:3) to forward" in note for note in notes(found))


def test_a_peak_that_moved_within_its_phase_is_said_to_and_one_whose_line_moved_is_not() -> None:
    before = make_side(10, make_moment("forward", {"net.py:3": 10}))
    elsewhere = make_side(10, make_moment("forward", {"net.py:3": 10}, "net.py:8"))
    lines = [KnownLine(source_line="net.py:5", function="f", code="y = self.act(x)")]
    moments = [make_moment("forward", {"net.py:5": 10}, "net.py:5")]
    below = make_side(10, moments=StepMoments(lines=lines, moments=moments))

    (said,) = notes(compare(before, elsewhere))
    assert "has moved within forward, from net.py:3 to net.py:8" in said
    assert notes(compare(before, below)) == []


def test_a_line_that_holds_nothing_in_one_version_is_not_called_new() -> None:
    before = make_side(10, make_moment("forward", {"net.py:8": 10}))
    found = compare(before, make_side(20, make_moment("forward", {"net.py:3": 20})))

    assert found.lines is not None
    assert not any(line.is_new or line.is_gone for line in found.lines)


def test_another_batch_plan_and_torch_are_said() -> None:
    before = make_side(10, batch_size=8, torch_version="2.12.0")
    after = make_side(10, batch_size=16, torch_version="2.13.0", strategies=("bf16",), ranks=2)
    said = " ".join(notes(compare(before, after)))

    for words in ("batch size: 8", "ranks: 1", "plan: plain before, bf16", "torch: 2.12.0"):
        assert words in said


def test_a_phase_other_than_the_steady_step_is_said_to_be_highest() -> None:
    before = make_side(10, make_moment("forward", {"net.py:3": 10}))
    after = make_side(
        10, make_moment("forward", {"net.py:3": 10}), peaks={STEADY_STEP: 10, "evaluation": 30}
    )
    found = compare(before, after)

    assert found.is_regression
    assert any("of the evaluation after" in note for note in notes(found))


# --- Parts ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("h.0.mlp", "h.*.mlp"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("12", "*"),
        ("a.1.2.b", "a.*.*.b"),
        ("block2", "block2"),
    ],
)
def test_numbers_between_dots_are_places_in_a_list(name, kind) -> None:
    assert kind_of(name) == kind


def test_modules_of_one_kind_are_one_row_and_one_alone_keeps_its_name() -> None:
    before = {f"h.{n}.mlp": 10 for n in range(4)} | {"h.0.attn": 5, "h.1.attn": 5, "head": 7}
    after = {**before, **{f"h.{n}.mlp": 12 for n in range(3)}, "h.1.attn": 9, "h.4.mlp": 12}
    rows = rolled_up(part_changes(before, after))

    assert rows == [
        PartChange(name="h.*.mlp", before_bytes=40, after_bytes=58, num_members=4),
        PartChange(name="h.1.attn", before_bytes=5, after_bytes=9),
    ]


def test_what_is_past_the_limit_is_added_up() -> None:
    rows = part_changes({"a": 1, "b": 2, "c": 0}, {"a": 4, "b": 1, "d": 1})

    assert rest_of(rows, 3) is None
    assert rest_of(rows, 1) == PartChange(name="(2 others)", before_bytes=2, after_bytes=2)
