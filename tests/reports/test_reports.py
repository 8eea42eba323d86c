"""The reports show every figure they are given, and nothing else."""

from __future__ import annotations

import io
import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console, RenderableType

from memfit.errors import MissingExtraError
from memfit.figures import (
    Certainty,
    ConsideredPlan,
    Holder,
    Measurement,
    Prediction,
    Term,
    Timeline,
)
from memfit.reports import text
from memfit.reports.contents import RunReport
from memfit.reports.timeline_points import (
    PhaseSpan,
    downsample,
    highest_events,
    kept_events,
    labelled_spans,
    phase_spans,
)
from memfit.reports.wording import explanation_lines, fits_sentence, shorten
from memfit.units import GIB, MIB

VOID_TAGS = {"meta", "br", "hr", "img", "input", "link"}


def make_timeline(*peaks_mib: int) -> Timeline:
    """Make a step that holds 100 MiB of parameters and these saved activations."""
    activations = [peak * MIB for peak in peaks_mib]
    return Timeline(
        allocated_bytes=[100 * MIB + value for value in activations],
        by_category={
            "parameters": [100 * MIB] * len(activations),
            "saved activations": activations,
        },
        phases=[(0, "forward"), (len(activations) // 2, "backward")],
    )


PLAIN = Prediction(
    device="cpu",
    batch_size=256,
    peak_allocated_bytes=3 * GIB,
    peak_reserved_bytes=3 * GIB + 512 * MIB,
    process_bytes=4 * GIB,
    first_step_peak_bytes=3 * GIB + 1 * MIB,
    step_seconds=0.8,
    by_category={"saved activations": 2 * GIB, "parameters": 1 * GIB, "batch": 0},
    by_module={"encoder": 2 * GIB, "": 1 * GIB},
    strategies=(),
    numerics="exact",
    certainty=Certainty.EXACT,
    budget_bytes=2 * GIB,
    fits=False,
    timeline=make_timeline(0, 900, 2972, 500, 0),
)
CHOSEN = ("micro-batch(2)", "checkpoint(encoder)")
PLANNED = replace(
    PLAIN,
    peak_allocated_bytes=GIB + 512 * MIB,
    first_step_peak_bytes=GIB + 513 * MIB,
    step_seconds=1.0,
    by_category={"saved activations": 512 * MIB, "parameters": 1 * GIB},
    by_module={"encoder": 512 * MIB, "": 1 * GIB},
    strategies=CHOSEN,
    fits=True,
    terms=(
        Term(name="blocks", num_bytes=1537 * MIB, certainty=Certainty.EXACT, source="recorded"),
        Term(name="context", num_bytes=77 * MIB, certainty=Certainty.GUESS, source="no record"),
    ),
    largest=(
        Holder(num_bytes=333 * MIB, category="parameters", module="encoder", operator="aten::to"),
        Holder(num_bytes=222 * MIB, category="temporaries", module="", operator="aten::mm"),
    ),
    timeline=make_timeline(0, 400, 1436, 300, 0),
)
MEASURED = Measurement(
    device="cpu",
    batch_size=256,
    peak_allocated_bytes=1600 * MIB,
    peak_reserved_bytes=None,
    process_bytes=5 * GIB,
    first_step_peak_bytes=1601 * MIB,
    step_seconds=1.25,
    by_category={"saved activations": 576 * MIB, "parameters": 1 * GIB},
    strategies=CHOSEN,
    numerics="exact",
    predicted_peak_bytes=PLANNED.peak_allocated_bytes,
    timeline=make_timeline(0, 410, 1500, 310, 0),
)
REFUSED = ConsideredPlan(
    strategies=(),
    numerics="exact",
    peak_bytes=3 * GIB,
    step_seconds=0.8,
    fits=False,
    chosen=False,
    reason="1.00 GiB above the budget.",
)
ROWS = (
    REFUSED,
    replace(
        REFUSED,
        strategies=CHOSEN,
        peak_bytes=1536 * MIB,
        step_seconds=1.0,
        fits=True,
        chosen=True,
        reason="The fastest exact plan that fits.",
    ),
    replace(
        REFUSED,
        strategies=("bf16",),
        numerics="approximate",
        peak_bytes=1717 * MIB,
        step_seconds=0.52,
        fits=True,
        reason="Approximate numerics were not allowed.",
    ),
)
REPORT = RunReport(
    title="conve on <FB15k-237>",
    job="conve",
    device="cpu",
    budget_bytes=2 * GIB,
    plain=PLAIN,
    planned=PLANNED,
    measured=MEASURED,
    rows=ROWS,
    metrics=(
        {"epoch": 1, "loss": 2.125, "valid_mrr": 0.125, "seconds": 61.0},
        {"epoch": 2, "loss": 1.75, "valid_mrr": 0.25, "seconds": 62.0, "peak_bytes": 1601 * MIB},
    ),
    results={"test_mrr": 0.3251, "hits": {"at_1": 0.237}, "train_seconds": 123.0},
    command="memfit train conve --budget 2GiB",
)


def rendered(renderable: RenderableType, width: int = 80) -> str:
    """Render as when the output is a file: no colour, no trailing spaces."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def words(output: str) -> str:
    """Join the lines of an output, for sentences that are wrapped."""
    return " ".join(output.split())


class OpenTags(HTMLParser):
    """Check that every tag is closed by its own end tag, and collect text, ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def parsed(page: str) -> OpenTags:
    """Parse a page and check that nothing stays open."""
    parser = OpenTags()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)


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
  process          5.00 GiB   4.00 GiB  -20.00 %
  first step peak  1.56 GiB   1.50 GiB   -4.00 %
  step time          1.25 s        1 s  -20.00 %

At the peak, by category
                      measured  predicted     error
  parameters          1.00 GiB   1.00 GiB   +0.00 %
  saved activations  576.0 MiB  512.0 MiB  -11.11 %

error = predicted / measured - 1"""
    assert rendered(text.measurement_table(MEASURED, PLANNED)) == expected


def test_a_measurement_alone_compares_the_peak_it_carries() -> None:
    output = rendered(text.measurement_table(MEASURED))
    assert re.search(r"peak allocated\s+1\.56 GiB\s+1\.50 GiB\s+-4\.00 %", output)
    assert re.search(r"process\s+5\.00 GiB\s+-\s+-", output)


def test_compared_predictions_name_what_differs() -> None:
    by_plan = rendered(text.comparison_table([PLAIN, PLANNED]))
    assert by_plan.startswith("Predicted steps on cpu\n  plan ")
    assert "+ checkpoint(encoder)" in by_plan
    by_device = rendered(text.comparison_table([PLAIN, replace(PLAIN, device="a100-40gb")]))
    assert by_device.startswith("Predicted steps (plain)\n  device ")
    both = rendered(text.comparison_table([PLAIN, replace(PLANNED, device="a100-40gb")]))
    assert re.search(r"micro-batch\(2\) .*\n.*checkpoint\(encoder\) .*\n +a100-40gb", both)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_80_columns(width: int) -> None:
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
        rendered(text.comparison_table([PLAIN, wide, replace(wide, device="b" * 30)]), width),
        rendered(text.measurement_table(MEASURED, wide), width),
        rendered(text.plan_table(rows), width),
    ):
        assert max(len(line) for line in output.splitlines()) <= 80
        assert "1,023.0 M\u2026" not in output
    assert "(4 others)" in rendered(text.prediction_table(wide), width)


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
    assert "guess" in rendered(text.comparison_table([gpu]))
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
    assert phase_spans(thin)[1].start == pytest.approx(50, abs=1)
    assert downsample(timeline, 30_000) is timeline


def test_phases_of_many_micro_batches_share_one_name() -> None:
    spans = [
        PhaseSpan(start=3 * number, end=3 * number + 3, name=name)
        for number, name in enumerate(["forward", "backward"] * 16)
    ]
    spans.append(PhaseSpan(start=96, end=100, name="optimizer"))
    labels = labelled_spans(spans, percent_per_letter=1.0)
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
    figure = plots.metrics_figure([*REPORT.metrics, {"epoch": 3, "loss": float("nan")}])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "valid mrr"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.125, 1.75]
    assert plots.metrics_figure([]).axes == []


def test_a_picture_is_a_png(plots: ModuleType) -> None:
    content = plots.png_bytes(plots.timeline_figure(PLANNED.timeline, None, title=""))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")


@pytest.fixture(scope="module")
def html() -> ModuleType:
    pytest.importorskip("jinja2", reason="the page needs the html extra")
    pytest.importorskip("matplotlib", reason="the page needs the html extra")
    from memfit.reports import html

    return html


@pytest.fixture(scope="module")
def page(html: ModuleType) -> str:
    return str(html.report_html(REPORT))


def test_the_page_holds_every_number(page: str) -> None:
    shown = words(parsed(page).text)
    numbers = [
        *("3.00 GiB", "1.50 GiB", "1.56 GiB", "2.00 GiB", "-4.00 %", "256"),
        *("800 ms", "1.25 s", "520 ms", "1.68 GiB", "512.0 MiB", "-75.00 %", "33.3 %"),
        *("333.0 MiB", "222.0 MiB", "77.0 MiB", "guess"),
        *("2.125", "1.75", "0.125", "0.25", "1 min 01 s", "1 min 02 s"),
        *("0.3251", "hits.at_1", "0.237", "2 min 03 s"),
    ]
    assert [number for number in numbers if number not in shown] == []
    for row in ROWS:
        assert row.reason in shown
    assert REPORT.command in shown
    assert REPORT.title in shown


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(page: str) -> None:
    parser = parsed(page)
    assert len(parser.ids) == len(set(parser.ids))
    assert all(address.startswith("#") for address in parser.addresses)
    assert set(re.findall(r"https?://[^/\"]+", page)) <= {"http://www.w3.org"}
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 3
    assert "<FB15k-237>" not in page


def test_the_chosen_plan_is_marked_once(page: str) -> None:
    assert page.count('class="chosen"') == 1
    row = page.split('<tr class="chosen">')[1].split("</tr>")[0]
    assert "micro-batch(2) + checkpoint(encoder)" in row
    assert "The fastest exact plan that fits." in row


def test_a_run_above_its_budget_is_not_called_fitting(html: ModuleType) -> None:
    above = replace(REPORT, measured=replace(MEASURED, peak_allocated_bytes=3 * GIB))
    content = html.report_html(above)
    assert '<p class="verdict bad">' in content
    shown = words(parsed(content).text)
    assert "The run went above the budget of 2.00 GiB: measured peak allocated 3.00 GiB" in shown
    assert "Fits the budget" not in shown


def test_a_report_without_measurement_metrics_or_timelines_is_still_a_page(
    html: ModuleType,
) -> None:
    step = replace(PLAIN, timeline=None)
    bare = replace(REPORT, budget_bytes=None, plain=step, planned=step, measured=None)
    bare = replace(bare, rows=(), metrics=(), results={})
    shown = words(parsed(html.report_html(bare)).text)
    assert "not measured" in shown
    assert "No budget was given." in shown
    assert "No timeline was recorded." in shown


def test_a_run_folder_gets_a_page_and_a_picture(tmp_path: Path, page: str) -> None:
    from memfit.reports.run_folder import write_report

    folder = tmp_path / "runs" / "first"
    page_path, picture_path = write_report(folder, REPORT)
    assert sorted(entry.name for entry in folder.iterdir()) == ["report.html", "timeline.png"]
    assert page_path.read_text(encoding="utf-8") == page
    assert picture_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_named_and_nothing_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.reports.run_folder import write_report

    hide(monkeypatch, package)
    with pytest.raises(MissingExtraError, match=rf"{package}.*memfit\[html\]"):
        write_report(tmp_path / "run", REPORT)
    assert not (tmp_path / "run").exists()


def test_the_page_names_the_peak_that_training_itself_has_measured(html: ModuleType) -> None:
    page = html.report_html(replace(REPORT, run_peak_bytes=1234 * MIB))
    assert "1.21 GiB" in page
    assert replace(REPORT, run_peak_bytes=3 * GIB).found_bytes == 3 * GIB
    assert "went above the budget" in html.report_html(replace(REPORT, run_peak_bytes=3 * GIB))
    by_process = replace(REPORT, planned=replace(PLANNED, budget_of="process"), run_peak_bytes=1)
    assert by_process.found_bytes == MEASURED.process_bytes
