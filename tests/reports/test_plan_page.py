"""The page of a plan shows the trade of memory against time, and what each plan of it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.reports.test_plan_reports import PLAN, ROWS, make_estimate, make_row

from memfit.cli.main import main
from memfit.reports.charts.frontier_chart import frontier_chart
from memfit.reports.plan_points import PointKind, plan_points
from memfit.units import MIB

pytest.importorskip("jinja2", reason="pages need the html extra")
pytest.importorskip("matplotlib", reason="pages need the html extra")


@pytest.fixture(scope="module")
def page() -> str:
    from memfit.reports.plan_html import plan_html

    named = replace(PLAN, notes=("<b>a note</b>",))
    return plan_html(named, job="<i>job.py</i>:job")


def by_name(*args, **options) -> dict:
    return {point.name: point for point in plan_points(*args, **options)}


# --- Points ---


def test_a_point_says_what_it_is_and_why_it_was_not_chosen() -> None:
    points = by_name(ROWS, PLAN.pareto, budget_bytes=150 * MIB)
    assert points["plain"].kind is PointKind.PLAIN
    assert points["a"].kind is PointKind.RECORDED
    assert points["a"].reason == "180.0 MiB over the budget"
    assert points["over the budget"].kind is PointKind.ESTIMATED
    assert points["over the budget"].reason.startswith("9.0 MiB over the budget.")
    assert not points["over the budget"].fits
    assert [point.kind for point in points.values()].count(PointKind.CHOSEN) == 1
    seconds = [point.step_seconds for point in points.values()]
    assert seconds == sorted(seconds)


def test_hundreds_of_blocks_are_spelt_out_of_the_chosen_plan_alone() -> None:
    blocks = " ".join(f"layers.{number}" for number in range(500))
    long = (f"activation-checkpointing(blocks={blocks})",)
    rows = [replace(row, strategies=(*long, f"x({n})")) for n, row in enumerate(ROWS)]
    spelt = [point.kind for point in plan_points(rows) if blocks in point.settings]
    assert spelt == [PointKind.CHOSEN]
    (few,) = (p for p in plan_points(ROWS) if p.kind is PointKind.CHOSEN)
    assert few.settings in ("", *(" + ".join(row.strategies) for row in ROWS))


def test_a_point_says_what_the_next_larger_plan_would_buy() -> None:
    rows = (
        make_row(100, 2.0, "small"),
        make_row(140, 1.0, "chosen", chosen=True),
        make_row(150, 1.5, "beaten"),
        make_row(240, 0.5, "large"),
    )
    points = by_name(rows)
    assert (
        points["small"].more == "40.0 MiB more buys chosen: 1 s less a step, or 25 ms for each MiB."
    )
    assert points["chosen"].more.startswith(
        "100.0 MiB more buys large: 500 ms less a step, or 5 ms"
    )
    assert points["beaten"].more == "In no more memory, chosen takes 1 s."
    assert points["large"].more == "No larger plan is known to be faster."


def test_of_very_many_plans_the_named_ones_and_those_that_nothing_beats_stay() -> None:
    beaten = [make_row(300 + number, 3.0 + number, f"beaten {number}") for number in range(400)]
    points = by_name([*beaten, *ROWS])
    assert len(points) == 150
    assert {"plain", "a", "i", "beaten 0"} <= set(points)
    assert "beaten 399" not in points


def test_recorded_and_estimated_points_are_told_apart_in_the_chart() -> None:
    points = plan_points(ROWS, [make_estimate(80, 2.0, "smaller")], budget_bytes=150 * MIB)
    chart = frontier_chart(points, budget_bytes=150 * MIB, figure_name="peak allocated")
    assert chart is not None
    known = {point["name"]: (point["kind"], point["known"]) for point in chart["points"]}
    assert known["smaller"] == ("estimated", "estimated, not recorded")
    assert known["a"] == ("recorded", "recorded")
    labels = {point["name"]: point["label"] for point in chart["points"]}
    assert labels["plain"] == "plain: 400.0 MiB, 1.1 s"
    assert labels["a"].startswith("with a instead of")
    assert frontier_chart(points[:1], budget_bytes=None, figure_name="") is None


def test_of_plans_that_are_all_too_large_the_smallest_is_called_so() -> None:
    rows = [make_row(200, 1.0, "a", chosen=True), make_row(400, 0.5)]
    chart = frontier_chart(plan_points(rows), budget_bytes=150 * MIB, figure_name="")
    assert [point["label"] for point in chart["points"]][-1].startswith("smallest: 200.0 MiB")
    names = {kind["kind"]: kind["name"] for kind in chart["kinds"]}
    assert names["chosen"] == "smallest"
    fitting = plan_points([make_row(100, 1.0, "a", chosen=True), make_row(400, 0.5)])
    kinds = frontier_chart(fitting, budget_bytes=150 * MIB, figure_name="")["kinds"]
    assert "chosen" in {kind["name"] for kind in kinds}


def test_labels_that_would_look_alike_are_written_once() -> None:
    checkpoints = [make_row(200 + n, 3.0 - n / 10, f"checkpoints(blocks={n})") for n in range(5)]
    rows = [make_row(140, 1.0, chosen=True), *checkpoints, make_row(90, 4.0, "small")]
    chart = frontier_chart(plan_points(rows), budget_bytes=None, figure_name="peak allocated")
    labels = [point["label"] for point in chart["points"]]
    assert len(labels) == 7
    assert [each for each in labels if each] == [
        "chosen: 140.0 MiB, 1 s",
        "with checkpoints(blocks=4)",
        "with checkpoints(blocks=3)",
        "with checkpoints(blocks=2)",
        "with checkpoints(blocks=1)",
        "with checkpoints(blocks=0)",
        "with small",
    ]
    long = [
        replace(row, strategies=("many-" * 6 + each,))
        for row, each in zip(rows, "abcdefg", strict=True)
    ]
    chart = frontier_chart(plan_points(long), budget_bytes=None, figure_name="peak allocated")
    shown = [point["label"] for point in chart["points"] if point["label"]]
    assert len(shown) == 2


def test_a_plan_of_hundreds_of_blocks_is_told_in_brief() -> None:
    long = f"activation-checkpointing(blocks={' '.join(f'blocks.{n}' for n in range(0, 800, 2))})"
    points = by_name([make_row(100, 2.0, long, chosen=True), make_row(90, 3.0, "small")])
    assert "activation-checkpointing(blocks=400 modules)" in points
    assert points["small"].more.startswith("10.0 MiB more buys activation-checkpointing(blocks=400")


# --- The page ---


def test_every_point_of_the_chart_has_its_plan_written_below(page: str) -> None:
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', page)[1])
    ids = [point["id"] for point in data["frontier"]["points"]]
    assert re.findall(r'<details class="plan [a-z]+" id="([^"]+)"', page) == ids
    assert page.count('<details class="plan chosen"') == 1
    assert data["frontier"]["mark"] == {"bytes": 150 * MIB, "label": "budget 150.0 MiB"}
    assert (
        '<figure data-chart="frontier" data-content="frontier"><div class="scroll still"><svg'
        in page
    )


def test_the_page_shows_what_the_terminal_shows(page: str) -> None:
    for words in (
        "Fits the budget of 150.0 MiB",
        "180.0 MiB over the budget",
        "Safer plans, should it not fit after all",
        "--allow bf16",
        "only with --allow",
        "nothing to act on.",
        "What more memory buys",
    ):
        assert words in page
    assert "&lt;b&gt;a note&lt;/b&gt;" in page
    assert "<i>job.py" not in page


def test_without_the_extra_nothing_is_searched(monkeypatch, capsys, tmp_path) -> None:
    job = tmp_path / "job.py"
    job.write_text("raise SystemError('it was loaded')\n")
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert main(["plan", f"{job}:job", "--html", str(tmp_path / "plan.html")]) == 1
    assert "pip install 'memfit[html]'" in " ".join(capsys.readouterr().err.split())
