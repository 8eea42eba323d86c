"""What is shown of a plan is found from its data, and fits 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
from tests.zoo.predictions import make_prediction
from tests.zoo.terminal import rendered

from memfit.figures import (
    Approximation,
    ConsideredPlan,
    ParetoPoint,
    Refusal,
    RefusalKind,
    Remedy,
)
from memfit.planner.result.planning_result import PlanningResult
from memfit.reports.plan_rows import (
    considered_rows,
    curve,
    is_measured,
    larger_budgets,
    plain_row,
    refusals,
    remedy_rows,
    spread_out,
    with_chosen_time,
)
from memfit.reports.text import plan_report, plan_table
from memfit.reports.wording import instead_of, plan_name
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Strategy
from memfit.strategies.micro_batching import MicroBatching
from memfit.units import GIB, MIB

KEEP = ("addmm.0", "_scaled_dot_product_flash_attention_for_cpu.0", "addmm.1", "add.0")
RECOMPUTED = ActivationCheckpointing(blocks=("blocks.0-11",), keep=KEEP)
SPLIT = MicroBatching(micro_batch_size=8)
LONG = RECOMPUTED.label()


def make_row(
    peak_mib: int, seconds: float, *strategies: str, chosen: bool = False, reason: str = ""
) -> ConsideredPlan:
    """Make a considered plan; the budget is 150 MiB."""
    return ConsideredPlan(
        strategies=strategies,
        numerics="exact",
        peak_bytes=peak_mib * MIB,
        step_seconds=seconds,
        fits=peak_mib <= 150,
        chosen=chosen,
        reason=reason,
    )


def make_estimate(peak_mib: int, seconds: float, name: str) -> ParetoPoint:
    """Make a point that was not recorded."""
    return ParetoPoint(
        strategies=(name,),
        peak_bytes=peak_mib * MIB,
        step_seconds=seconds,
        is_recorded=False,
        is_chosen=False,
    )


def make_remedy(strategy: str, most_mib: int, state: str, *, is_recorded: bool = False) -> Remedy:
    """Make what a strategy could take off."""
    return Remedy(
        strategy=strategy, most_bytes=most_mib * MIB, is_recorded=is_recorded, state=state
    )


def refused(strategy: str, sentence: str, kind: RefusalKind = RefusalKind.UNSUITED) -> Refusal:
    """Make a strategy that was left out."""
    return Refusal(kind=kind, strategy=strategy, sentence=sentence)


def make_plan(peak_mib: int, seconds: float, *strategies: Strategy) -> PlanningResult:
    """Make a plan with its prediction and nothing around it."""
    prediction = make_prediction(
        peak_mib * MIB,
        step_seconds=seconds,
        by_module={"encoder": peak_mib * MIB},
        strategies=tuple(strategy.label() for strategy in strategies),
        budget_bytes=150 * MIB,
        fits=True,
    )
    return PlanningResult(strategies=strategies, prediction=prediction)


CHOSEN = make_row(140, 1.0, LONG, SPLIT.label(), chosen=True, reason="the fastest that fits")
ROWS = (
    CHOSEN,
    make_row(330, 0.8, "a", reason="180.0 MiB over the budget"),
    make_row(335, 0.81, "b"),
    make_row(200, 0.9, "c"),
    make_row(190, 0.95, "d"),
    make_row(160, 0.96, "e"),
    make_row(400, 1.1, reason="250.0 MiB over the budget"),
    make_row(120, 1.2, "f"),
    make_row(110, 1.3, "g"),
    make_row(115, 1.4, "h"),
    make_row(90, 1.5, "i", reason="slower by 500 ms a step"),
)
PLAN = replace(
    make_plan(140, 1.0, RECOMPUTED, SPLIT),
    considered=ROWS,
    pareto=(
        make_estimate(165, 0.97, "beaten by what is recorded"),
        make_estimate(158, 0.955, "near what is recorded"),
        make_estimate(159, 0.88, "over the budget"),
        make_estimate(139, 0.7, "refuted"),
        make_estimate(80, 2.0, "smaller"),
    ),
    ladder=(make_plan(120, 1.2, RECOMPUTED, SPLIT),),
    approximations=(
        Approximation(allow="bf16", strategies=("bf16",), peak_bytes=70 * MIB, step_seconds=1.25),
    ),
    remedies=(
        make_remedy("pure-bf16", 200, "allow it with --allow pure-bf16"),
        make_remedy("micro-batching", 300, "used"),
        make_remedy("activation-offload", 300, "give --disk SIZE."),
        make_remedy("tiling", 200, "nothing to act on."),
        make_remedy("optimizer-in-backward", 20, "not needed"),
        make_remedy("optimizer-implementation", 0, "used", is_recorded=True),
        make_remedy("linear-cross-entropy", 0, "not needed", is_recorded=True),
    ),
    refused=(
        refused("pure-bf16", "allow it with --allow pure-bf16", RefusalKind.NOT_ALLOWED),
        refused("activation-offload", "give --disk SIZE.", RefusalKind.NO_DISK),
        refused("tiling", "nothing to act on."),
    ),
    notes=("the loss was not checked.",),
)


# --- What is shown ---


def test_the_rows_are_the_chosen_plan_the_plain_step_and_the_nearest_on_both_sides() -> None:
    shown = considered_rows(ROWS)
    names = [row.strategies[0] if row.strategies else "plain" for row in shown.rows]
    assert names == [LONG, "a", "c", "d", "plain", "f", "g", "h"]
    assert shown.num_more == len(ROWS) - 8
    assert considered_rows(ROWS[:2]).num_more == 0


def test_the_plain_step_is_known_only_where_it_was_recorded() -> None:
    assert plain_row(ROWS) is ROWS[6]
    assert plain_row(ROWS[:2]) is None


def test_the_curve_leaves_out_estimates_that_are_refuted_and_keeps_all_that_was_recorded() -> None:
    points = curve(PLAN)
    assert [point.peak_bytes // MIB for point in points] == [
        330,
        159,
        200,
        190,
        160,
        140,
        120,
        110,
        90,
        80,
    ]
    assert [point.is_recorded for point in points].count(False) == 2
    assert [point.strategies for point in points if point.is_chosen] == [CHOSEN.strategies]
    assert curve(make_plan(1, 1.0)) == ()


def test_a_long_curve_is_thinned_evenly_and_keeps_both_ends_and_the_chosen_plan() -> None:
    points = [
        replace(make_estimate(1000 - place, float(place), f"{place}"), is_chosen=place == 333)
        for place in range(900)
    ]
    shown = spread_out(points, 10)
    peaks = [point.peak_bytes // MIB for point in shown]
    assert len(shown) == 10
    assert (peaks[0], peaks[-1]) == (1000, 101)
    assert any(point.is_chosen for point in shown)
    gaps = [high - low for high, low in pairwise(peaks) if high - low > 100]
    assert max(gaps) <= 114
    assert spread_out(points[:10], 10) == tuple(points[:10])


def test_a_larger_budget_is_named_where_it_saves_a_hundredth_or_more() -> None:
    points = curve(PLAN)
    tenth, gigabyte = larger_budgets(points, 150 * MIB)
    assert (tenth.more, tenth.budget_bytes) == ("10 %", 165 * MIB)
    assert tenth.point.peak_bytes == 160 * MIB, "recorded, though an estimate promises more"
    assert tenth.saved_fraction == pytest.approx(0.04)
    assert (gigabyte.more, gigabyte.budget_bytes) == ("1.00 GiB", 150 * MIB + GIB)
    assert gigabyte.point.peak_bytes == 330 * MIB
    slow = [replace(p, step_seconds=max(p.step_seconds, 0.991)) for p in points]
    assert larger_budgets(slow, 150 * MIB) == ()
    assert larger_budgets((), 150 * MIB) == ()


def test_two_larger_budgets_that_buy_the_same_are_named_once() -> None:
    points = [point for point in curve(PLAN) if point.peak_bytes <= 160 * MIB]
    assert [larger.more for larger in larger_budgets(points, 150 * MIB)] == ["10 %"]


def test_remedies_are_those_that_are_open_or_that_an_option_would_open() -> None:
    assert [(row.strategy, row.known, row.state) for row in remedy_rows(PLAN)] == [
        ("pure-bf16", "at most", "only with --allow"),
        ("micro-batching", "at most", "used"),
        ("activation-offload", "at most", "only with --disk SIZE"),
        ("optimizer-in-backward", "at most", "not needed"),
        ("optimizer-implementation", "recorded", "used"),
    ]
    twice = replace(PLAN, refused=(*PLAN.refused, refused("bf16", "nothing to act on.")))
    assert refusals(twice) == {"nothing to act on.": ["tiling", "bf16"]}


def test_a_measured_time_stands_beside_no_estimate() -> None:
    assert PLAN.prediction is not None
    measured = replace(PLAN, prediction=replace(PLAN.prediction, step_seconds=0.7))
    assert (is_measured(measured), is_measured(PLAN)) == (True, False)
    assert with_chosen_time(measured)[0].step_seconds == 0.7
    assert [point.step_seconds for point in curve(measured) if point.is_chosen] == [1.0]
    output = rendered(plan_report(measured))
    assert "The fastest plans were run here." in output
    assert "a step would take" not in output
    assert re.search(r"120\.0 MiB +1\.2 s +\+20\.0 %", output)


# --- How it is shown ---


def test_the_considered_plans_show_the_chosen_one_and_every_reason() -> None:
    rows = [
        make_row(330, 0.8, "linear-cross-entropy(1024)", reason="180.0 MiB over the budget"),
        CHOSEN,
        replace(make_row(100, 1.2, "bf16"), numerics="approximate"),
    ]
    expected = """\
Plans considered (> chosen)
        peak    step  fits  plan
   330.0 MiB  800 ms  no    linear-cross-entropy(1024)
                            180.0 MiB over the budget
>  140.0 MiB     1 s  yes   activation-checkpointing
                              (blocks=blocks.0-11, keep=4 results)
                            + micro-batching(8)
                            the fastest that fits
   100.0 MiB   1.2 s  yes   bf16
                            approximate"""
    assert rendered(plan_table(rows)) == expected


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_report_names_everything_and_fits_80_columns(width: int) -> None:
    output = rendered(plan_report(PLAN), width)
    for fragment in (
        "_scaled_dot_product_flash_attention_for_cpu.0",  # once, of the chosen plan
        "3 more were recorded",
        "Memory against time (> chosen; budget 150.0 MiB)",
        "With 10 % more (165.0 MiB) a step would take 960 ms, 4.0 % less, with e instead of",
        "instead of activation-checkpointing(blocks=blocks.0-11, keep=4 results) and",
        "With 1.00 GiB more (1.15 GiB) a step would take 800 ms, 20.0 % less, with a instead of",
        "What one approximation would buy, recorded",
        "Safer plans, should it not fit after all",
        "What each strategy could take off the plain step's peak allocated of 400.0 MiB",
        "only with --disk SIZE",
        "tiling: nothing to act on.",
        "the loss was not checked.",
    ):
        assert fragment in " ".join(output.split()), fragment
    assert output.count("_for_cpu") == 1
    assert re.search(r"micro-batching +300\.0 MiB +75\.0 % +at most +used", output)
    assert re.search(r"optimizer-implementation +0 B +0\.0 % +recorded +used", output)
    assert re.search(r"--allow bf16 +70\.0 MiB +-50\.0 % +1\.25 s +\+25\.0 %", output)
    assert re.search(r"> +140\.0 MiB +1 s +-9\.1 %", output)
    assert "encoder" not in output


def test_shares_and_changes_are_left_out_where_the_plain_step_is_unknown() -> None:
    required = replace(PLAN, considered=[row for row in ROWS if row.strategies])
    output = rendered(plan_report(required))
    assert "off the plain step's peak allocated\n" in output
    assert "to plain" not in output
    assert re.search(r"micro-batching +300\.0 MiB +at most +used", output)


def test_the_fastest_plan_says_that_more_memory_buys_nothing() -> None:
    fastest = replace(CHOSEN, step_seconds=0.5)
    plan = replace(make_plan(140, 0.5, SPLIT), considered=[fastest, *ROWS[7:]])
    assert "No larger budget is known to make the step faster." in rendered(plan_report(plan))
    alone = replace(plan, considered=[fastest])
    assert "Memory against time" not in rendered(plan_report(alone))


def test_what_lies_beside_the_device_is_shown_where_there_is_any() -> None:
    assert PLAN.prediction is not None
    spilled = replace(PLAN.prediction, host_bytes=30 * MIB, disk_bytes=40 * MIB)
    output = rendered(plan_report(replace(PLAN, prediction=spilled)))
    assert re.search(r"on the host +30\.0 MiB", output)
    assert re.search(r"on disk +40\.0 MiB", output)
    assert "on disk" not in rendered(plan_report(PLAN))


def test_a_plan_is_compared_with_another_by_what_differs() -> None:
    assert instead_of(("a", "b"), ("a",)) == "with b"
    assert instead_of(("a",), ("a", LONG)) == (
        "without activation-checkpointing(blocks=blocks.0-11, keep=4 results)"
    )
    assert instead_of(("a", "b", "c"), ("a", "d")) == "with b and c instead of d"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("bf16",), "bf16"),
        ((), "plain"),
        (("bf16" * 8, "tiling(4)"), f"{'bf16' * 8}\n+ tiling(4)"),
        ((LONG,), "activation-checkpointing\n  (blocks=blocks.0-11, keep=4 results)"),
        (
            ("activation-checkpointing(a.0 a.2 a.4 a.6)",),
            "activation-checkpointing(4 names)",
        ),
        (
            ("activation-checkpointing(blocks=a b c, keep=d e)",),
            "activation-checkpointing\n  (blocks=3 modules, keep=d e)",
        ),
        (
            (LONG, "x(2)", LONG, LONG),
            "activation-checkpointing\n  (3 times, for different blocks)\n+ x(2)",
        ),
    ],
)
def test_a_long_plan_is_named_in_brief(labels: tuple[str, ...], expected: str) -> None:
    assert plan_name(labels, width=35) == expected


# --- The picture ---


@pytest.fixture
def picture() -> ModuleType:
    pytest.importorskip("matplotlib", reason="pictures need the plots extra")
    from memfit.reports import pareto_plot

    return pareto_plot


def test_the_picture_shows_every_kind_of_point_and_the_budget(picture: ModuleType) -> None:
    (axes,) = picture.pareto_figure(PLAN).axes
    _, labels = axes.get_legend_handles_labels()
    assert set(labels) == {
        "recorded",
        "estimated",
        "chosen: 140.0 MiB, 1 s",
        "plain step: 400.0 MiB, 1.1 s",
        "budget: 150.0 MiB",
    }
    assert axes.get_xlabel() == "peak allocated (MiB)"
    assert axes.get_ylabel() == "predicted step time (s)"
    recorded, estimated = axes.collections
    assert len(recorded.get_offsets()) == 7
    assert [tuple(place) for place in estimated.get_offsets()] == [(159.0, 0.88), (80.0, 2.0)]
    line = axes.lines[0]
    assert list(line.get_xdata()) == [90, 110, 120, 140, 160, 190, 200, 330], "recorded ones only"
    assert list(line.get_ydata()) == sorted(line.get_ydata(), reverse=True)
    filled, hollow = recorded.get_facecolors()[0], estimated.get_facecolors()[0]
    assert tuple(filled) == tuple(recorded.get_edgecolors()[0])
    assert min(hollow) > 0.99
    budget = next(line for line in axes.lines if line.get_label() == "budget: 150.0 MiB")
    assert set(budget.get_xdata()) == {150.0}


def test_a_budget_far_above_every_peak_does_not_flatten_the_picture(picture: ModuleType) -> None:
    assert PLAN.prediction is not None
    wide = replace(PLAN, prediction=replace(PLAN.prediction, budget_bytes=80 * GIB))
    (axes,) = picture.pareto_figure(wide).axes
    assert "budget: 80.00 GiB (outside the picture)" in axes.get_legend_handles_labels()[1]
    assert axes.get_xlim()[1] < 500


def test_a_plan_that_is_the_plain_step_is_drawn_once(picture: ModuleType) -> None:
    plain = make_row(140, 0.002, chosen=True)
    (axes,) = picture.pareto_figure(replace(make_plan(140, 0.002), considered=[plain])).axes
    assert axes.get_legend_handles_labels()[1] == ["chosen: 140.0 MiB, 2 ms", "budget: 150.0 MiB"]
    assert axes.get_ylabel() == "predicted step time (ms)"
