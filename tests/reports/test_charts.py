"""Charts have the figures that they show, and names from outside stay names."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from tests.reports.step_samples import PLANNED
from tests.reports.test_run_page import needs_browser, opened

from memfit.figures import Advice, Timeline, Topic
from memfit.prediction.lives import Life
from memfit.reports.charts import embedding
from memfit.reports.charts.embedding import charts_of, visible
from memfit.reports.charts.step_chart import step_chart
from memfit.reports.prediction_html import prediction_html
from memfit.units import MIB

pytest.importorskip("jinja2", reason="pages need the html extra")

EVIL = '</script><script>alert(1)</script><!-- & "\x00\x1b[31m\u202e\u2028'


def life(begin: int, end: int, num_bytes: int, **names: str) -> Life:
    known = {"category": "saved activations", "module": "encoder", "source_line": "a.py:1", **names}
    return Life(begin=begin, end=end, num_bytes=num_bytes, num_blocks=1, **known)


def scripts_of(page: str) -> list[str]:
    """Return what stands in the script elements of a page."""
    return re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.DOTALL)


def data_of(page: str) -> dict:
    return json.loads(scripts_of(page)[0])


NAMES = {"module": EVIL, "source_line": f"{EVIL}:1", "category": f"{EVIL} 2"}


@pytest.fixture(scope="module")
def page() -> str:
    """Return the page of a step whose every name would like to be markup."""
    return prediction_html(PLANNED, (), job=EVIL, lives=[life(1, 4, 400 * MIB, **NAMES)])


# --- What is embedded ---


def test_the_policy_of_a_page_names_its_scripts_and_nothing_else_may_run(page) -> None:
    _, *scripts = scripts_of(page)
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    policy = re.search(r'content="(default-src[^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    allowed = policy[1].partition("script-src ")[2]
    assert allowed == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "unsafe-eval" not in policy[1]


def test_names_from_outside_end_no_script_and_are_read_back_as_names(page) -> None:
    assert len(scripts_of(page)) == 3
    assert "alert(1)</script" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert {visible(name) for name in NAMES.values()} == set(
        data_of(page)["step"]["lives"]["names"]
    )


def test_what_cannot_be_seen_is_replaced_and_lines_stay() -> None:
    assert visible("a\x00b\x9bc\u202ed\ne\tf") == "a\\x00b\\x9bc\\u202ed\ne\tf"


def test_json_of_a_page_has_no_sign_of_markup() -> None:
    charts = charts_of({"step": {"name": EVIL, "value": 0.5}, "none": None})
    assert charts is not None
    assert not set("<>&") & set(str(charts.data))
    assert str(charts.data).isascii()
    assert json.loads(str(charts.data)) == {"step": {"name": EVIL, "value": 0.5}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        charts_of({"step": {"value": float("nan")}})


def test_a_page_without_charts_has_no_scripts() -> None:
    assert charts_of({"step": None}) is None
    page = prediction_html(replace(PLANNED, timeline=None), (), job="job.py:job")
    assert "<script" not in page
    assert "script-src" not in page


def test_the_library_is_the_one_that_its_readme_names() -> None:
    folder = files(embedding.__package__) / "echarts"
    readme, library = (folder / "README.md").read_text(), (folder / "echarts.min.js").read_bytes()
    version = re.search(r"\| version \| ([\d.]+) \|", readme)
    assert version
    assert f't.version="{version[1]}"'.encode() in library
    assert hashlib.sha256(library).hexdigest() in readme
    assert b"</script" not in library
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert "Apache ECharts" in (folder / "NOTICE").read_text()
    assert (folder / "licenses" / "LICENSE-d3").is_file()


# --- A step ---


def long_timeline(num_events: int, peak_at: int) -> Timeline:
    totals = [50 * MIB if event == peak_at else event % 17 * MIB for event in range(num_events)]
    return Timeline(
        allocated_bytes=totals,
        by_category={"batch": totals},
        phases=[(0, "forward"), (num_events // 2, "backward")],
    )


def test_a_long_step_is_thinned_and_keeps_its_peak_in_its_place() -> None:
    chart = step_chart(long_timeline(90_001, 61_234))
    assert chart is not None
    assert len(chart["x"]) == len(chart["total"]) == len(chart["parts"][0]["values"]) <= 2000
    assert chart["x"][chart["total"].index(50 * MIB)] == 61_234
    assert (chart["x"][0], chart["last"]) == (0, 90_000)
    assert [phase["name"] for phase in chart["phases"]] == ["forward", "backward"]
    assert chart["phases"][1]["begin"] == 45_000


def test_of_too_many_lives_those_at_the_peak_are_kept_before_larger_ones(monkeypatch) -> None:
    monkeypatch.setattr("memfit.reports.charts.step_chart._MOST_LIVES", 2)
    lives = [life(0, 3, 9 * MIB), life(4, 8, 1 * MIB), life(5, 6, 2 * MIB), life(8, 9, 8 * MIB)]
    chart = step_chart(long_timeline(10, 5), lives=lives)
    assert chart is not None
    assert chart["lives"]["bytes"] == [2 * MIB, 1 * MIB]


@pytest.mark.slow
def test_a_page_of_a_step_of_two_thousand_modules_stays_below_three_megabytes() -> None:
    lives = [
        life(event, event + 3000, 1000 + event, module=f"layers.{event % 2000}.attention.output")
        for event in range(60_000)
    ]
    prediction = replace(PLANNED, timeline=long_timeline(60_000, 40_000))
    assert len(prediction_html(prediction, (), job="job.py:job", lives=lives)) < 3_000_000


def test_without_scripts_the_picture_and_the_tables_are_there(page) -> None:
    figure = re.search(r'<figure data-chart="step".*?</figure>', page, flags=re.DOTALL)
    assert figure
    assert "<svg" in figure[0]
    assert re.search(r'<section class="scripted" hidden>\s*<h2>Who holds it', page)


# --- In a browser ---

DRIVEN = """<!doctype html><meta charset="utf-8"><body><iframe style="width: 900px; height: 900px"
srcdoc="{page}"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const inside = frame.contentDocument;
  const told = () => inside.querySelector(".alive").innerText;
  const press = (key) => inside.querySelector("figure[data-chart=step] .canvas").dispatchEvent(
    new frame.contentWindow.KeyboardEvent("keydown", {{ key }}));
  const said = [told(), ...["Home", "ArrowRight"].map((key) => {{ press(key); return told(); }})];
  frame.replaceWith(document.createTextNode(said.join(String.fromCharCode(0x2016))));
}};
</script></body>"""


@pytest.mark.slow
@needs_browser
def test_the_moment_that_is_chosen_says_who_holds_its_bytes(tmp_path) -> None:
    timeline = Timeline(
        allocated_bytes=[100 * MIB, 300 * MIB, 700 * MIB, 300 * MIB],
        by_category={
            "parameters": [100 * MIB] * 4,
            "saved activations": [0, 200 * MIB, 600 * MIB, 200 * MIB],
        },
        phases=[(0, "forward")],
    )
    lives = [life(0, 4, 100 * MIB, category="parameters"), life(1, 4, 200 * MIB, module=EVIL)]
    page = prediction_html(replace(PLANNED, timeline=timeline), (), job="job.py", lives=lives)
    path = tmp_path / "driven.html"
    path.write_text(DRIVEN.format(page=html.escape(page)), "utf-8")
    elements, logged = opened(path)
    assert "CONSOLE" not in logged, logged
    at_peak, at_start, then = html.unescape(elements).split("\u2016")
    assert "At the peak: event 2, forward, 700.0 MiB allocated" in at_peak
    assert re.search(r"400\.0 MiB\s+57\.1 %\s+saved activations\s+\(smaller blocks\)", at_peak)
    assert "Event 0, forward, 100.0 MiB allocated" in at_start
    assert "saved activations" not in at_start
    assert "Event 1, forward, 300.0 MiB allocated" in then
    assert visible(EVIL).splitlines()[0][:20] in then


@pytest.mark.slow
def test_modules_that_are_alike_are_one_row_of_the_page() -> None:
    by_module = {f"blocks.{number}.{name}": MIB for number in range(400) for name in ("up", "down")}
    page = prediction_html(replace(PLANNED, by_module=by_module), (), job="job.py:job")

    assert "blocks.*.up (400 x 1.0 MiB)" in page
    assert "blocks.399.up" not in page.partition("<script")[0]


@pytest.mark.slow
def test_commands_in_advice_are_set_as_code() -> None:
    advice = Advice(topic=Topic.SAVED_ACTIVATIONS, num_bytes=MIB, part_fraction=0.6)

    assert "<code>memfit plan</code>" in prediction_html(PLANNED, [advice], job="job.py:job")
