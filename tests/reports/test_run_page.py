"""The page of a run shows what it is given, in a real browser as well, and asks nothing of it."""

from __future__ import annotations

import functools
import html
import json
import operator
import re
import shutil
import subprocess
import sys
from bisect import bisect_right
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from tests.reports import run_samples
from tests.reports.run_samples import FACTS, LEAK, SAMPLES, make_steps, write_run
from tests.reports.step_samples import MEASURED, PLAIN, PLANNED, TRAINING

from memfit.cli.main import main
from memfit.errors import MissingExtraError
from memfit.figures import Timeline
from memfit.journal.records import StepRecord
from memfit.journal.timeline import StepTimeline, write_timeline
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import charts_of_run, run_html, write_run_page
from memfit.reports.run_plots import metrics_figure, ranks_figure, run_figure, step_figure
from memfit.reports.training import read_training, write_training
from memfit.units import GIB, MIB

PNG = b"\x89PNG"
VOID_TAGS = {"meta", "br", "hr", "img", "input", "link", "wbr"}
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here to open pages in")
KEY_TEXTS = {
    "leaked": (
        "A leak used up the memory",
        LEAK.holder,
        "train.py:88",
        "1.1 MiB",
        "metrics.reset()",
    ),
    "killed-by-host": ("Killed by the host", "oom_kill went from 0 to 1", "exit code 137"),
    "over-budget": ("Over the budget", "110.5 % of it used", "2.00 GiB"),
    "recovered": (
        "Done",
        "twice",
        "micro-batching(32)",
        "Smaller plans in reserve (3)",
        "went well",
    ),
    "trained": (
        "Done",
        *("3.00 GiB", "1.50 GiB", "1.55 GiB", "2.00 GiB", "-3.40 %", "256"),
        *("800 ms", "520 ms", "1.68 GiB", "512.0 MiB", "-75.00 %", "33.3 %"),
        *("333.0 MiB", "222.0 MiB", "77.0 MiB", "guess"),
        *("2.125", "1.75", "0.125", "0.25", "1 min 01 s", "1 min 02 s"),
        *("0.3251", "hits.at_1", "0.237", "2 min 03 s", "conve on <FB15k-237>"),
        *(row.reason for row in TRAINING.considered),
        "The run stayed within the budget of 2.00 GiB: measured peak allocated 1.55 GiB",
        TRAINING.command,
    ),
    "two-ranks": ("Out of memory", "7.20 GiB", "5.80 GiB", "rank 1, the highest of 2"),
}


@functools.cache
def page_of(name: str, folder: Path) -> str:
    return run_html(read_report(SAMPLES[name](folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def body_text(page: str) -> str:
    body = page.partition("<body>")[2]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body)))


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


# --- The page as text ---


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_page_shows_what_matters(name, folder):
    text = body_text(page_of(name, folder / name))
    for words in KEY_TEXTS[name]:
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_page_is_well_formed_and_asks_nothing_of_the_network(name, folder):
    page = page_of(name, folder / name)
    parser = parsed(page)
    assert len(parser.ids) == len(set(parser.ids))
    assert all(address.startswith("#") for address in parser.addresses)
    assert "default-src 'none'" in page
    without_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    addresses = re.findall(r"https?://[^\s\"'<>)]+", without_scripts)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(addresses) <= namespaces


PREDICTED = run_samples.make_timeline(1.0)


def with_scratch() -> Timeline:
    """Make the predicted step as it would be measured: with a few bytes that come and go."""
    events = [event for event in range(600) for _ in range(3 if event % 5 else 1)]
    totals = [PREDICTED.allocated_bytes[event] for event in events]
    scratch = [8 * (event == before) for before, event in pairwise([-1, *events])]
    parts = {
        name: [part[event] for event in events] for name, part in PREDICTED.by_category.items()
    }
    return Timeline(
        allocated_bytes=list(map(operator.add, totals, scratch)),
        by_category={**parts, "temporaries": scratch},
        phases=[(0, "forward")],
    )


def check_that_both_lie_on_each_other(chart) -> None:
    assert (chart["name"], chart["other"]["name"]) == ("measured", "predicted")
    for place, total in zip(chart["other"]["x"], chart["other"]["total"], strict=True):
        here = chart["total"][bisect_right(chart["x"], place) - 1]
        assert abs(here - total) <= 8
    assert chart["x"][-1] == pytest.approx(chart["other"]["x"][-1], abs=1)


@pytest.mark.parametrize("has_places", [True, False], ids=["places", "an older file"])
def test_a_measured_step_lies_on_a_prediction_that_is_right(tmp_path, has_places):
    run_samples.over_budget(tmp_path)
    steps = StepTimeline(step=2, measured=with_scratch(), predicted=PREDICTED)
    path = write_timeline(tmp_path, steps)
    content = json.loads(path.read_text())
    if not has_places:
        del content["measured"]["places"], content["predicted"]["places"]
    path.write_text(json.dumps(content))
    check_that_both_lie_on_each_other(charts_of_run(read_report(tmp_path))["timeline"])


def test_so_does_the_measured_step_of_a_training_however_long(tmp_path, monkeypatch):
    monkeypatch.setattr("memfit.journal.timeline._MOST_POINTS", 900)
    run_samples.trained(tmp_path)
    planned = replace(PLANNED, timeline=PREDICTED)
    measured = replace(MEASURED, timeline=with_scratch())
    write_training(tmp_path, replace(TRAINING, planned=planned, measured=measured))
    chart = charts_of_run(read_report(tmp_path))["timeline"]
    top = chart["total"].index(max(chart["total"]))
    other_top = chart["other"]["total"].index(max(chart["other"]["total"]))
    assert chart["x"][top] == pytest.approx(chart["other"]["x"][other_top], abs=2)
    assert chart["x"][-1] == pytest.approx(chart["other"]["x"][-1], abs=1)


def test_names_from_outside_are_shown_as_they_are(tmp_path):
    leak = replace(LEAK, holder="<b>x</b>", sentence="`a<b` & more", chain=("<i>",))
    facts = replace(FACTS, title="<script>alert(1)</script>")
    page = run_html(read_report(write_run(tmp_path, facts, (), (leak,))))
    assert "<script>alert" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<code>a&lt;b</code> &amp; more" in page


@pytest.mark.slow
def test_of_very_many_events_the_first_are_shown_and_the_rest_counted(tmp_path):
    report = read_report(run_samples.recovered(tmp_path))
    first = report.out_of_memory[0]
    many = tuple(replace(first, event=replace(first.event, step=number)) for number in range(1, 81))
    page = run_html(replace(report, out_of_memory=many))
    assert "50 more are in events.jsonl" in body_text(page)


# --- A training ---


def training_page(folder: Path, **changes) -> str:
    run_samples.trained(folder)
    write_training(folder, replace(TRAINING, **changes))
    return run_html(read_report(folder))


@pytest.mark.slow
def test_the_chosen_plan_is_marked_once(folder):
    page = page_of("trained", folder / "trained")
    assert page.count('class="chosen"') == 1
    row = page.split('<tr class="chosen">')[1].split("</tr>")[0]
    assert "micro-batch(2) + checkpoint(encoder)" in row


def test_a_training_is_written_and_read_back(tmp_path):
    write_training(tmp_path, replace(TRAINING, run_peak_bytes=7))
    found = read_training(tmp_path)
    assert found is not None
    assert found.run_peak_bytes == 7
    assert json.dumps(found.planned.to_json()) == json.dumps(TRAINING.planned.to_json())
    assert list(found.plain.timeline.allocated_bytes) == list(PLAIN.timeline.allocated_bytes)
    assert tuple(found.considered) == TRAINING.considered


@pytest.mark.slow
def test_many_modules_of_one_kind_are_one_row(tmp_path):
    layers = {f"h.{number}.fc": 3 * MIB for number in range(400)}
    plain = replace(PLAIN, by_module={**layers, "head": MIB})
    write_run(tmp_path, FACTS, make_steps(3), ())
    write_training(tmp_path, replace(TRAINING, plain=plain, planned=replace(plain, fits=True)))
    page = run_html(read_report(tmp_path))
    section = page.partition("At the peak, by module")[2].partition("</table>")[0]
    assert "h.*.fc (400 modules)" in section
    assert "1.17 GiB" in section
    assert "h.0.fc" not in section
    assert re.findall(r">(head|\(\d+ others\))<", section) == ["head"]


@pytest.mark.slow
def test_a_title_may_end_its_line_behind_what_joins_its_parts_alone(tmp_path):
    write_run(tmp_path, replace(FACTS, title="a/very_long.py:<job>&"), make_steps(3), ())
    page = run_html(read_report(tmp_path))
    assert "<h1>a/<wbr>very_<wbr>long.<wbr>py:<wbr>&lt;job&gt;&amp;</h1>" in page


@pytest.mark.slow
def test_a_run_above_its_budget_is_not_called_fitting(tmp_path):
    page = training_page(tmp_path, run_peak_bytes=3 * GIB)
    text = body_text(page)
    assert '<p class="verdict bad">' in page
    assert "The run went above the budget of 2.00 GiB: measured peak allocated 3.00 GiB" in text
    assert "stayed within" not in text


@pytest.mark.slow
def test_a_training_that_goes_on_has_a_page(tmp_path):
    step = replace(PLAIN, timeline=None)
    bare = {"plain": step, "planned": step, "measured": None, "considered": (), "results": {}}
    text = body_text(training_page(tmp_path, budget_bytes=None, **bare))
    assert "No budget was given." in text
    assert "Plans considered" not in text


@pytest.mark.slow
def test_the_page_names_the_peak_that_training_itself_has_measured(tmp_path):
    assert "1.21 GiB" in training_page(tmp_path, run_peak_bytes=1234 * MIB)
    by_process = replace(TRAINING, planned=replace(PLANNED, budget_of="process"), run_peak_bytes=1)
    assert by_process.found_bytes == MEASURED.process_bytes


@pytest.mark.slow
def test_pictures_of_results_are_part_of_the_page(tmp_path):
    (tmp_path / "samples.png").write_bytes(PNG)
    page = training_page(tmp_path, pictures=("samples.png", "gone.png"))
    assert page.count("data:image/png;base64") == 1


# --- Odd journals ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        [],
        [StepRecord(step=1, time_seconds=0.1, step_seconds=0.1)],
        make_steps(1, peak_allocated_bytes=lambda n: GIB),
        make_steps(1, host_bytes=lambda n: GIB),
        make_steps(5, predicted_peak_bytes=lambda n: GIB),
        make_steps(3, peak_allocated_bytes=lambda n: 0, host_bytes=lambda n: 0),
        make_steps(
            9,
            peak_allocated_bytes=lambda n: GIB,
            predicted_peak_bytes=lambda n: GIB if n % 2 else None,
        ),
    ],
    ids=["none", "bare", "one", "host", "predicted", "zero", "gaps"],
)
@pytest.mark.parametrize("events", [(), (LEAK,)], ids=["quiet", "leak"])
def test_a_page_and_its_pictures_come_of_any_journal(tmp_path, steps, events):
    facts = None if steps else FACTS
    report = read_report(write_run(tmp_path, facts, steps, events))
    page, *pictures = write_run_page(report)
    measured = any(
        step.peak_allocated_bytes is not None or step.host_bytes is not None for step in steps
    )
    assert [path.name for path in pictures] == (["run-peaks.png"] if measured else [])
    assert ("No step of this run measured its memory." in page.read_text()) == (not measured)


@pytest.mark.slow
def test_a_very_long_run_is_thinned_and_keeps_its_highest_step(tmp_path):
    steps = make_steps(
        200_000,
        peak_allocated_bytes=lambda n: (5 if n == 123_457 else 1 + n % 2) * GIB,
        host_bytes=lambda n: 2 * GIB,
    )
    report = replace(read_report(write_run(tmp_path, FACTS, steps[:3])), steps={0: steps})
    figure = run_figure(report, max_points=1600)
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "peak allocated"]
    numbers, values = line.get_xdata(), line.get_ydata()
    assert len(values) <= 1600
    assert max(values) == 5
    assert numbers[list(values).index(5)] == 123_457
    assert len(run_html(report)) < 1_500_000


# --- Pictures ---


def labels_of(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_picture_of_a_run_names_every_line_and_mark(folder):
    report = read_report(SAMPLES["recovered"](folder / "recovered-picture"))
    figure = run_figure(report)
    assert labels_of(figure) == [
        "predicted peak allocated",
        "peak reserved",
        "peak allocated",
        "budget 14.56 GiB",
        "out of memory (2)",
        "larger plan again (1)",
        "host",
    ]
    device, host = figure.axes
    assert device.get_ylabel() == "peak (GiB)"
    assert host.get_ylabel() == "host (GiB)"
    assert host.get_xlabel() == "step"
    low, high = device.get_xlim()
    assert low < 1
    assert high > 1500
    assert device.get_ylim()[1] > 14.56


def test_a_budget_far_above_is_named_and_not_drawn(tmp_path):
    facts = replace(FACTS, budget_bytes=80 * GIB)
    steps = make_steps(5, peak_allocated_bytes=lambda n: GIB)
    figure = run_figure(read_report(write_run(tmp_path, facts, steps)))
    assert "budget 80.00 GiB (above the picture)" in labels_of(figure)
    assert figure.axes[0].get_ylim()[1] < 2


def test_an_event_after_the_last_step_is_in_the_picture(tmp_path):
    late = replace(LEAK, step=40)
    figure = run_figure(
        read_report(write_run(tmp_path, FACTS, make_steps(5, host_bytes=lambda n: 1), (late,)))
    )
    assert figure.axes[0].get_xlim()[1] > 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 7])
def test_the_axis_of_a_single_step_or_epoch_names_it_once(tmp_path, number):
    steps = [StepRecord(step=number, time_seconds=1, step_seconds=1, peak_allocated_bytes=GIB)]
    figures = [
        run_figure(read_report(write_run(tmp_path, FACTS, steps))),
        metrics_figure([{"epoch": number, "loss": 0.5}]),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        axes = figure.axes[0]
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert [tick.label1.get_text() for tick in ticks] == [str(number)]


@pytest.mark.slow
def test_ranks_and_timelines_are_drawn_where_there_are_any(folder):
    alone = read_report(SAMPLES["over-budget"](folder / "alone"))
    assert ranks_figure(alone) is None
    assert step_figure(alone) is None
    ranks = ranks_figure(read_report(SAMPLES["two-ranks"](folder / "ranks")))
    assert labels_of(ranks) == ["peak allocated", "peak reserved", "host"]
    heights = [bar.get_height() for bar in ranks.axes[0].patches]
    assert heights == pytest.approx([5.8, 7.2, 6.1, 7.5])
    step = step_figure(read_report(SAMPLES["recovered"](folder / "step")))
    assert [axes.get_title(loc="left") for axes in step.axes] == ["predicted", "measured"]


# --- The command ---


@pytest.mark.slow
def test_the_command_writes_the_page_and_the_pictures(tmp_path, capsys):
    run_samples.recovered(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    shown = "".join(capsys.readouterr().out.split())  # long paths are wrapped
    for name in ("run-peaks.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
        assert name in shown
    assert "<title>gpt-small - memfit</title>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib.figure"])
def test_without_the_extra_nothing_is_written_and_the_pip_line_is_named(
    tmp_path, monkeypatch, package
):
    run_samples.over_budget(tmp_path)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[html\]'"):
        write_run_page(read_report(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    assert main(["report", str(tmp_path), "--no-page"]) == 0


# --- In a browser ---

FRAME = """<!doctype html><meta charset="utf-8"><body><iframe id="frame" style="width: {width}px; height: 900px" srcdoc="{page}">
</iframe><script>
document.getElementById("frame").onload = function () {{
  const inside = this.contentDocument.documentElement;
  document.body.dataset.width = inside.clientWidth;
  document.body.dataset.scroll = inside.scrollWidth;
  const parts = [...inside.querySelectorAll("figure[data-chart] > *")].map((part) => part.getBoundingClientRect());
  document.body.dataset.chart = Math.ceil(Math.max(0, ...parts.map((part) => part.right)));
  document.body.dataset.still = inside.querySelectorAll("figure[data-chart]:not(.live)").length;
  this.replaceWith(document.createTextNode(inside.innerText));
}};
</script></body>"""


def opened(path: Path) -> tuple[str, str]:
    """Open a page without a window; give its elements as they then are, and what was logged."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run(
        [str(BROWSER), *words, profile, f"file://{path}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


def framed(page: str, width: int, folder: Path) -> tuple[str, int, int]:
    """Show a page in so many pixels; give its text, its width and the width of its content."""
    path = folder / "frame.html"
    path.write_text(FRAME.format(width=width, page=html.escape(page)))
    elements, _ = opened(path)
    found = re.search(r'data-width="(\d+)" data-scroll="(\d+)"', elements)
    assert found, elements[:500]
    return html.unescape(elements), int(found[1]), int(found[2])


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_browser_shows_the_page_without_a_complaint(name, folder, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page_of(name, folder / name))
    elements, logged = opened(path)
    assert "CONSOLE" not in logged, logged
    assert elements.count('class="canvas"') == elements.count(" data-chart=")
    assert elements.count("<canvas") >= elements.count('class="canvas"') > 0
    for words in KEY_TEXTS[name]:
        assert words in body_text(elements)


@pytest.mark.slow
@needs_browser
def test_the_browser_would_complain_of_a_request(folder, tmp_path):
    path = tmp_path / "report.html"
    page = page_of("over-budget", folder / "over-budget")
    path.write_text(page.replace("<main>", '<main><img src="https://example.invalid/x.png">'))
    assert "CONSOLE" in opened(path)[1]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("name", ["leaked", "recovered", "trained", "two-ranks"])
def test_on_a_narrow_screen_the_page_does_not_scroll_sideways(name, folder, tmp_path):
    text, width, content = framed(page_of(name, folder / name), 400, tmp_path)
    assert KEY_TEXTS[name][0] in text
    assert 350 < width <= 400
    assert content <= width
    right, still = re.findall(r'data-chart="(\d+)" data-still="(\d+)"', text)[0]
    assert 0 < int(right) <= width, "a chart is whole on a narrow screen"
    assert int(still) == 0


@pytest.mark.slow
@needs_browser
def test_a_page_that_is_too_wide_would_be_found(folder, tmp_path):
    page = page_of("leaked", folder / "leaked")
    wide = page.replace("<main>", '<main><div style="width: 700px">x</div>')
    _, width, content = framed(wide, 400, tmp_path)
    assert content > width


@pytest.mark.slow
def test_the_page_knows_dark_screens(folder):
    page = page_of("leaked", folder / "leaked")
    assert "prefers-color-scheme: dark" in page
    assert "var(--plot-ink" in page
