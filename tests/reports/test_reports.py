"""The reports show every figure they are given, and nothing else."""

from __future__ import annotations

import io
import random
import re
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console
from tests.reports.step_samples import MEASURED, METRICS, PLAIN, PLANNED, ROWS, make_timeline
from tests.zoo.terminal import rendered

from memfit.figures import Certainty, Holder, Term, Timeline
from memfit.reports import text
from memfit.reports.timeline_points import (
    PhaseSpan,
    downsample,
    highest_events,
    kept_events,
    labelled_spans,
    phase_spans,
)
from memfit.reports.wording import change_words, explanation_lines, fits_sentence, shorten
from memfit.units import GIB, MIB


def test_a_prediction_is_shown_with_every_part() -> None:
    expected = """\
Predicted step on cpu
  peak allocated   1.50 GiB  exact
  peak reserved    3.50 GiB  exact
  process          4.00 GiB  guess
  first step peak  1.50 GiB  exact
  step time             1 s  estimate
  batch size            256
  plan             micro-batch(2) + checkpoint(encoder)
  numerics         exact
  Fits the budget of 2.00 GiB: peak allocated 1.50 GiB, 512.0 MiB to spare.

At the peak, by category
  parameters          1.00 GiB  66.7 %  ███████████████
  saved activations  512.0 MiB  33.3 %  ███████

At the peak, by module
  (step)    1.00 GiB  66.7 %  ███████████████
  encoder  512.0 MiB  33.3 %  ███████

Largest allocations at the peak
      bytes  category     module, operator, phase and line
  333.0 MiB  parameters   encoder, aten::to
  222.0 MiB  temporaries  (step), aten::mm

Terms
  term        bytes  known  source
  blocks   1.50 GiB  exact  recorded
  context  77.0 MiB  guess  no record"""
    assert rendered(text.prediction_table(PLANNED)) == expected


def test_a_measurement_stands_beside_its_prediction_with_a_signed_error() -> None:
    expected = """\
Measured step on cpu, batch size 256
  plan: micro-batch(2) + checkpoint(encoder) (exact)
                   measured  predicted     error
  peak allocated   1.56 GiB   1.50 GiB   -4.00 %
  peak reserved           -   3.50 GiB         -
  process          5.00 GiB          -         -
  first step peak  1.56 GiB   1.50 GiB   -4.00 %
  step time          1.25 s        1 s  -20.00 %

At the peak, by category
                      measured  predicted     error
  parameters          1.00 GiB   1.00 GiB   +0.00 %
  saved activations  576.0 MiB  512.0 MiB  -11.11 %

error = predicted / measured - 1"""
    assert rendered(text.measurement_table(MEASURED, PLANNED)) == expected


def test_a_change_is_written_in_percent_up_to_many_times() -> None:
    changes = [(5, 5), (0, 5), (5, 0), (4, 5), (5, 50), (3, 4000)]
    words = [change_words(*each) for each in changes]
    assert words == ["same", "new", "gone", "+25.00 %", "10 times", "1,333 times"]


def test_a_measurement_alone_compares_the_peak_it_carries() -> None:
    output = rendered(text.measurement_table(MEASURED))
    assert re.search(r"peak allocated\s+1\.56 GiB\s+1\.50 GiB\s+-4\.00 %", output)
    assert re.search(r"process\s+5\.00 GiB\s+-\s+-", output)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_120_columns(width: int) -> None:
    long_name = "encoder.layers." + "very_long_submodule_name." * 4 + "weight"
    long_plan = tuple(f"checkpoint({long_name[:30]}{number})" for number in range(4))
    wide = replace(
        PLANNED,
        by_module={f"{long_name}{number}": 1023 * MIB for number in range(14)},
        by_category={"saved activations": 1023 * MIB},
        strategies=long_plan,
        largest=(
            Holder(
                num_bytes=1023 * MIB,
                category="saved activations",
                module=long_name,
                operator="aten::_scaled_dot_product_efficient_attention_backward",
            ),
        ),
        terms=(Term(name="context", num_bytes=1, certainty=Certainty.TABLE, source="x" * 200),),
    )
    rows = [replace(ROWS[2], strategies=long_plan, reason="because " * 30)]
    for output in (
        rendered(text.prediction_table(wide), width),
        rendered(text.measurement_table(MEASURED, wide), width),
        rendered(text.plan_table(rows), width),
    ):
        assert "1,023.0 M\u2026" not in output
    assert "(5 others)" in rendered(text.prediction_table(wide), width)


def test_a_guess_on_a_gpu_says_guess_wherever_the_figure_stands() -> None:
    gpu = replace(
        PLAIN,
        device="a100-40gb",
        certainty=Certainty.GUESS,
        budget_of="process",
        budget_bytes=40 * GIB,
        fits=True,
    )
    output = rendered(text.prediction_table(gpu))
    for figure in ("peak allocated", "peak reserved", "process", "first step peak", "step time"):
        assert re.search(rf"{figure} .*guess", output)
    assert "process 4.00 GiB (a guess)" in output
    assert "process 4.00 GiB (a guess)" in explanation_lines(gpu, gpu)[0]


def test_names_with_brackets_and_colons_are_shown_as_they_are() -> None:
    odd = replace(
        PLANNED,
        by_module={"layers[red]": MIB},
        strategies=("checkpoint[bold]", ":cat:"),
        numerics="[dim]exact",
    )
    output = rendered(text.prediction_table(odd))
    for name in ("layers[red]", "checkpoint[bold] + :cat:", "[dim]exact"):
        assert name in output


def test_a_terminal_without_unicode_gets_ascii_bars() -> None:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    Console(file=file, width=80).print(text.prediction_table(PLANNED))
    assert b"###" in written.getvalue()


def test_an_empty_step_is_shown_without_a_division_by_zero() -> None:
    empty = replace(PLAIN, peak_allocated_bytes=0, by_category={"batch": 1}, budget_bytes=None)
    output = rendered(text.prediction_table(replace(empty, fits=None)))
    assert "peak allocated        0 B" in output
    assert "No budget was given." in output


def test_the_explanation_tells_what_the_plan_changes() -> None:
    lines = explanation_lines(PLAIN, PLANNED, budget_bytes=2 * GIB, rows=ROWS)
    assert lines == [
        "The plain step: peak allocated 3.00 GiB, 1.00 GiB above the budget of 2.00 GiB.",
        "The plan micro-batch(2) + checkpoint(encoder) brings it to 1.50 GiB (-50.00 %).",
        "What changes most at the peak: saved activations 2.00 GiB to 512.0 MiB.",
        "The step is predicted to take 1 s; plain, 800 ms (+25.00 %).",
        "Numerics: exact: equal to the plain step up to rounding. The effective batch size is 256.",
        "Why this plan: The fastest exact plan that fits.",
    ]


def test_a_prediction_that_does_not_fit_says_by_how_much() -> None:
    assert fits_sentence(PLAIN, PLAIN.budget_bytes) == (
        "Does not fit the budget of 2.00 GiB: peak allocated 3.00 GiB, 1.00 GiB too much."
    )


def test_a_shortened_name_keeps_both_ends() -> None:
    assert shorten("encoder.layers.11.attention.output", 20) == "encoder....on.output"
    assert shorten("encoder", 7) == "encoder"


def test_thinning_keeps_the_maximum_both_ends_and_the_limit() -> None:
    generator = random.Random(0)
    values = [generator.randrange(1000) for _ in range(20_011)]
    values[13_337] = 5000
    for kept in (kept_events(values, 4000), highest_events(values, 160)):
        assert 13_337 in kept
        assert (kept[0], kept[-1]) == (0, 20_010)
        assert kept == sorted(set(kept))
    assert 3000 < len(kept_events(values, 4000)) <= 4000
    assert len(highest_events(values, 160)) <= 160
    timeline = Timeline(
        allocated_bytes=values, by_category={"batch": values}, phases=[(0, "a"), (10_005, "b")]
    )
    thin = downsample(timeline, 4000)
    assert max(thin.allocated_bytes) == 5000
    assert thin.by_category["batch"] == thin.allocated_bytes
    assert phase_spans(thin)[1].start == pytest.approx(10_005, abs=10)
    assert [values[place] for place in thin.places] == thin.allocated_bytes
    assert downsample(timeline, 30_000) is timeline


def test_phases_of_many_micro_batches_share_one_name() -> None:
    spans = [
        PhaseSpan(start=3 * number, end=3 * number + 3, name=name)
        for number, name in enumerate(["forward", "backward"] * 16)
    ]
    spans.append(PhaseSpan(start=96, end=100, name="optimizer"))
    labels = labelled_spans(spans, events_per_letter=1.0)
    assert [span.name for span in labels] == ["opt.", "forward and backward, 16 times"]
    wide = [
        PhaseSpan(start=0, end=40, name="forward"),
        PhaseSpan(start=40, end=90, name="backward"),
    ]
    assert [span.name for span in labelled_spans(wide, 1.75)] == ["forward", "backward"]


@pytest.fixture
def plots() -> ModuleType:
    pytest.importorskip("matplotlib", reason="pictures need the html extra")
    from memfit.reports import plots

    return plots


@pytest.mark.parametrize(
    ("predicted", "measured", "num_panels"),
    [
        (PLANNED.timeline, MEASURED.timeline, 2),
        (PLANNED.timeline, None, 1),
        (None, MEASURED.timeline, 1),
        (None, None, 0),
    ],
)
def test_a_timeline_has_a_panel_for_each_side(
    plots: ModuleType, predicted: Timeline | None, measured: Timeline | None, num_panels: int
) -> None:
    figure = plots.timeline_figure(predicted, measured, budget_bytes=2 * GIB, title="A step")
    assert len(figure.axes) == num_panels
    svg = plots.svg_text(figure)
    assert svg.count("peak 1.") == num_panels
    assert ("budget 2.00 GiB" in svg) == bool(num_panels)
    assert ("No timeline was recorded." in svg) == (num_panels == 0)


def test_a_budget_far_above_the_peak_is_named_but_not_drawn(plots: ModuleType) -> None:
    figure = plots.timeline_figure(PLANNED.timeline, None, budget_bytes=80 * GIB, title="")
    assert "budget 80.00 GiB (above the picture)" in plots.svg_text(figure)
    assert figure.axes[0].get_ylim()[1] < 3


def test_the_peak_is_not_written_across_the_line_of_the_budget(plots: ModuleType) -> None:
    timeline = make_timeline(0, 900, 0)
    peak_bytes = max(timeline.allocated_bytes)
    figure = plots.timeline_figure(timeline, None, budget_bytes=int(peak_bytes * 1.05))
    label = next(entry for entry in figure.axes[0].texts if entry.get_text().startswith("peak"))
    assert label.get_position()[1] > peak_bytes * 1.05 / GIB


@pytest.mark.slow
def test_a_picture_in_a_page_follows_its_colours_and_keeps_ids_apart(plots: ModuleType) -> None:
    figure = plots.timeline_figure(PLANNED.timeline, MEASURED.timeline, title="A step")
    svg = plots.svg_text(figure, prefix="first")
    assert svg.startswith("<svg")
    assert "var(--plot-ink, " in svg
    assert "<metadata" not in svg
    assert all(name.startswith("first-") for name in re.findall(r'\bid="([^"]*)"', svg))
    targets = set(re.findall(r'(?:url\(|href=")#([^")]*)', svg))
    assert targets
    assert targets <= set(re.findall(r'\bid="([^"]*)"', svg))


def test_metrics_draw_the_loss_and_the_validation_metric(plots: ModuleType) -> None:
    from memfit.reports.run_plots import metrics_figure

    figure = metrics_figure([*METRICS, {"epoch": 3, "loss": float("nan")}])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "valid mrr"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.125, 1.75]
    assert metrics_figure([]).axes == []


@pytest.mark.slow
def test_a_picture_is_a_png(plots: ModuleType) -> None:
    content = plots.png_bytes(plots.timeline_figure(PLANNED.timeline, None, title=""))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")


def test_a_wider_terminal_has_more_of_a_name_and_of_a_source() -> None:
    name, source = "encoder." + "layer." * 9 + "weight", "read from " + "a datasheet " * 4
    found = replace(
        PLANNED,
        by_module={name: MIB},
        largest=(Holder(num_bytes=MIB, category="gradients", module=name, operator="mm"),),
        terms=(Term(name="context", num_bytes=1, certainty=Certainty.TABLE, source=source),),
    )

    usual, wide = (rendered(text.prediction_table(found), width) for width in (80, 120))
    assert name not in usual
    assert wide.count(name) == 2
    assert source.strip() in wide
    assert max(map(len, rendered(text.prediction_table(found), 200).splitlines())) <= 120
