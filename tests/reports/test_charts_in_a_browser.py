"""Charts answer to a pointer in a real browser, and ask nothing of the network.

The browser is the system's own Chromium; playwright drives it. `pip install -e '.[browser]'`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.reports.page_samples import EVIL, PAGES

from memfit.units import MIB

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser: pip install -e '.[browser]'"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here to open pages in"),
]

CHARTLESS = ("table", "comparison", "huge-table", "huge-comparison")
"""Pages that have no charts, and no scripts."""
WIDTHS = (420, 1000, 1600)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, make in PAGES.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(make(folder / name), encoding="utf-8")
    return paths


class Opened:
    """A page that is open, and what it asked for and complained of."""

    def __init__(self, context, path: Path) -> None:
        self.page = context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())

    def pixel(self, chart: str, x: float, y: float) -> tuple[float, float]:
        """Return where on the screen a point of a chart lies."""
        canvas = self.page.locator(f"figure[data-chart={chart}] .canvas").first
        canvas.scroll_into_view_if_needed()
        found = canvas.evaluate(
            "(canvas, at) => echarts.getInstanceByDom(canvas)"
            ".convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, at)",
            [x, y],
        )
        box = canvas.bounding_box()
        return box["x"] + found[0], box["y"] + found[1]

    def zoom(self, chart: str) -> tuple[float, float]:
        """Return the part of a chart's axis that is shown, in percent."""
        canvas = self.page.locator(f"figure[data-chart={chart}] .canvas").first
        return tuple(
            canvas.evaluate(
                "canvas => { const zoom = echarts.getInstanceByDom(canvas).getOption().dataZoom[0];"
                " return [zoom.start, zoom.end]; }"
            )
        )

    def check(self) -> None:
        """See that nothing was asked of anybody, and nothing complained of."""
        assert [url[:60] for url in self.requests if not url.startswith("file:")] == []
        assert self.complaints == []


@pytest.fixture
def opened(browser, pages) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def open_page(name: str, **options) -> Opened:
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1000, "height": 900}, **options})
        )
        return Opened(contexts[-1], pages[name])

    yield open_page
    for context in contexts:
        context.close()


# --- Every page ---


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_whole_on_every_screen_and_complains_of_nothing(opened, name, scheme):
    found = opened(name, color_scheme=scheme)
    for width in WIDTHS:
        found.page.set_viewport_size({"width": width, "height": 900})
        found.page.wait_for_timeout(50)
        assert found.page.evaluate(WIDEST) <= width, f"at {width}: {found.page.evaluate(CULPRITS)}"
        assert found.page.evaluate(CUT) == [], f"at {width}"
        charts = found.page.evaluate(CHART_WIDTHS)
        assert bool(charts) == (name not in CHARTLESS)
        assert all(0.5 * min(width, 1260) < each <= width for each in charts)
    ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 22, 27)") == (scheme == "dark")
    found.check()


WIDEST = """Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll("body *")]
    .filter((each) => each.checkVisibility() && !each.closest(".scroll, svg"))
    .map((each) => each.getBoundingClientRect().right))"""
"""How far the page reaches, but for what scrolls inside a frame of its own."""
CULPRITS = """[...document.querySelectorAll("body *")]
    .filter((each) => each.checkVisibility() && !each.closest(".scroll, svg")
        && each.getBoundingClientRect().right > document.documentElement.clientWidth)
    .map((each) => each.className)"""
CUT = """[...document.querySelectorAll(".card *, .verdict, section > ul li, h1, dd, summary")]
    .filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).display !== "inline")
    .map((each) => each.textContent.slice(0, 60))"""
"""Texts that stick out of their frames."""
CHART_WIDTHS = """[...document.querySelectorAll(".canvas")].map(
    (canvas) => canvas.getBoundingClientRect().width)"""


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_verdict_comes_first_and_no_page_is_endless(opened, name):
    found = opened(name)
    top = found.page.locator(".verdict").first.bounding_box()
    assert top["y"] + top["height"] < 600
    assert found.page.evaluate("document.documentElement.scrollHeight") < 10_000


@pytest.mark.parametrize("name", sorted(PAGES))
def test_without_scripts_a_page_is_read_by_its_pictures_and_tables(opened, name):
    found = opened(name, java_script_enabled=False)
    assert found.page.locator(".canvas").count() == 0
    assert not any(each.is_visible() for each in found.page.locator(".scripted").all())
    assert found.page.locator(".verdict").first.is_visible()
    assert found.page.locator("table").first.is_visible()
    has_pictures = name.removeprefix("huge-") in ("prediction", "plan", "run", "ranks")
    assert found.page.locator("figure svg").first.is_visible() == has_pictures


def test_a_picture_comes_back_where_its_chart_cannot_be_drawn(browser, pages, tmp_path):
    path = tmp_path / "broken.html"
    path.write_text(pages["run"].read_text("utf-8").replace('"along":"step"', '"along_":0', 1)
                    .replace('"panels":[', '"panels_":[', 1))  # fmt: skip
    context = browser.new_context()
    found = Opened(context, path)
    figure = found.page.locator("figure[data-content=run-peaks]")
    assert figure.locator("svg").first.is_visible()
    assert figure.locator(".canvas").count() == 0
    assert found.page.locator("figure[data-content=timeline] .canvas").count() == 1
    context.close()


# --- A step ---


def test_hovering_over_a_step_shows_its_bytes_at_that_moment(opened):
    found = opened("prediction")
    found.page.mouse.move(*found.pixel("step", 2.5, 100))
    tip = found.page.locator("figure[data-chart=step] .tip")
    assert "event 2, forward" in tip.inner_text()
    assert "700.0 MiB" in tip.inner_text()
    assert "600.0 MiB" in tip.inner_text()
    found.check()


def test_a_click_on_a_moment_shows_who_holds_its_bytes(opened):
    found = opened("prediction")
    table = found.page.locator(".alive")
    assert "At the peak: event 2, forward, 700.0 MiB allocated" in table.inner_text()
    assert "(smaller blocks)" in table.inner_text(), "20 MiB are of none that the page knows"
    found.page.mouse.click(*found.pixel("step", 3.1, 100))
    assert "Event 3, backward, 300.0 MiB allocated" in table.inner_text()
    assert "encoder.first" in table.inner_text()
    assert "(smaller blocks)" not in table.inner_text()
    rows = table.locator("tbody tr .number:first-child").all_inner_texts()
    assert rows == ["200.0 MiB", "100.0 MiB"]
    found.page.locator("figure[data-chart=step] .canvas").press("Home")
    assert "Event 0, forward, 100.0 MiB allocated" in table.inner_text()
    found.check()


def test_the_map_at_the_peak_adds_up_to_it(opened):
    found = opened("prediction")
    values = found.page.locator("figure[data-chart=holders] .canvas").evaluate(
        "canvas => echarts.getInstanceByDom(canvas).getOption().series[0].data.map(n => n.value)"
    )
    assert sum(values) == 700 * MIB


def test_a_name_from_outside_is_never_markup(opened):
    found = opened("prediction")
    box = found.page.locator("figure[data-chart=holders] .canvas").bounding_box()
    for part in (0.2, 0.4, 0.6, 0.8):
        found.page.mouse.move(box["x"] + part * box["width"], box["y"] + 0.5 * box["height"])
    found.page.wait_for_timeout(200)
    assert EVIL in found.page.locator(".alive").inner_text()
    assert found.page.locator("img").count() == 0
    assert found.page.title().startswith("<img src=x")
    assert found.page.locator("script").count() == 3
    found.check()


ALL_CHARTS = [
    ("prediction", "step", (2.5, 100)),
    ("plan", "frontier", (90, 1.5)),
    ("cards", "frontier", (24, 2)),
    ("run", "lines", (600, 10)),
    ("ranks", "bars", (0, 1)),
    ("proof", "errors", (1, 3e-12)),
    ("huge-prediction", "step", (2000, 1)),
    ("huge-plan", "step", (2000, 1)),
    ("huge-run", "lines", (3000, 1)),
    ("huge-proof", "errors", (1000, 1e-9)),
]
"""Where there is something to point at, in the units of the axes."""


@pytest.mark.parametrize(("name", "chart", "place"), ALL_CHARTS)
def test_pointing_at_a_chart_tells_its_figures(opened, name, chart, place):
    found = opened(name)
    found.page.mouse.move(*found.pixel(chart, *place))
    tip = found.page.locator(f"figure[data-chart={chart}] .tip").first
    tip.wait_for(state="visible", timeout=2000)
    assert tip.locator("tr").count() >= 1
    found.check()


@pytest.mark.parametrize(("name", "chart"), [each[:2] for each in ALL_CHARTS])
def test_ctrl_and_the_wheel_zoom_and_the_page_alone_scrolls(opened, name, chart):
    found = opened(name)
    assert found.zoom(chart) == (0, 100)
    canvas = found.page.locator(f"figure[data-chart={chart}] .canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 90)
    found.page.mouse.wheel(0, -5)
    assert found.zoom(chart) == (0, 100)
    found.page.keyboard.down("Control")
    found.page.mouse.wheel(0, -300)
    found.page.keyboard.up("Control")
    found.page.wait_for_timeout(200)
    start, end = found.zoom(chart)
    assert 0 < start < end < 100
    found.check()


def test_a_drag_of_a_handle_zooms(opened):
    found = opened("prediction")
    canvas = found.page.locator("figure[data-chart=step] .canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    left, _ = found.pixel("step", 0, 0)
    height = box["y"] + box["height"] - 34 - 11
    found.page.mouse.move(left + 3, height)
    found.page.mouse.down()
    found.page.mouse.move(left + 200, height, steps=5)
    found.page.mouse.up()
    found.page.wait_for_timeout(200)
    assert found.zoom("step")[0] > 10


def test_a_screen_that_turns_dark_is_followed_and_keeps_the_zoom(opened):
    found = opened("prediction", color_scheme="light")
    canvas = found.page.locator("figure[data-chart=step] .canvas")
    canvas.evaluate(
        "canvas => echarts.getInstanceByDom(canvas)"
        ".dispatchAction({ type: 'dataZoom', start: 20, end: 60 })"
    )
    ink = "canvas => echarts.getInstanceByDom(canvas).getOption().textStyle.color"
    before = canvas.evaluate(ink)
    found.page.emulate_media(color_scheme="dark")
    found.page.wait_for_timeout(200)
    assert canvas.evaluate(ink) != before
    assert found.zoom("step") == (20, 60)


# --- A plan, a proof, devices, a table ---


@pytest.mark.parametrize("name", ["plan", "cards"])
def test_labels_stay_inside_the_picture_however_often_it_is_drawn(opened, name):
    found = opened(name, viewport={"width": 420, "height": 900})
    canvas = found.page.locator("figure[data-chart=frontier] .canvas")
    for _ in range(3):
        ends = canvas.evaluate(LABEL_ENDS)
        assert len(ends) > 2
        assert all(0 <= left < right <= canvas.bounding_box()["width"] for left, right in ends)
        canvas.evaluate(
            "canvas => echarts.getInstanceByDom(canvas)"
            ".dispatchAction({ type: 'dataZoom', start: 0, end: 100 })"
        )


LABEL_ENDS = """canvas => echarts.getInstanceByDom(canvas).getZr().storage.getDisplayList(true)
    .filter((each) => each.style && each.style.text && !each.ignore)
    .map((each) => {
        const box = each.getBoundingRect().clone();
        box.applyTransform(each.transform || [1, 0, 0, 1, 0, 0]);
        return box;
    })
    .filter((box) => box.y < canvas.clientHeight - 60)
    .map((box) => [box.x, box.x + box.width])"""
"""Of all texts above the legend, which scrolls."""


@pytest.mark.parametrize("name", ["table", "huge-table"])
def test_a_click_on_a_place_of_a_table_opens_it_without_scripts(opened, name):
    found = opened(name, java_script_enabled=False, viewport={"width": 420, "height": 900})
    place = found.page.locator(".place:visible")
    assert place.count() == 0
    found.page.locator("table.places a").nth(1).click()
    first = place.get_attribute("id")
    assert place.locator("dd").first.inner_text().endswith("MiB")
    place.locator(".steps a").first.click()
    assert place.count() == 1
    assert place.get_attribute("id") != first
    found.check()


@pytest.mark.parametrize("name", ["huge-run"])
def test_what_is_folded_unfolds(opened, name):
    found = opened(name)
    seen = sum(each.is_visible() for each in found.page.locator(".finding").all())
    found.page.get_by_text("25 more", exact=True).first.click()
    assert (seen, sum(each.is_visible() for each in found.page.locator(".finding").all())) == (
        5,
        30,
    )


def test_the_map_of_a_huge_model_begins_with_all_of_it_and_names_kinds_of_layers(opened):
    found = opened("huge-prediction")
    canvas = found.page.locator("figure[data-chart=holders] .canvas")
    shown = canvas.evaluate(
        "canvas => echarts.getInstanceByDom(canvas).getZr().storage.getDisplayList(true)"
        ".filter((each) => each.style && each.style.text).map((each) => each.style.text)"
    )
    assert "all" in shown
    assert not any("others" in text for text in shown)
    assert any("*.up" in text for text in shown)
    assert "(400 modules)" in found.page.locator(".alive").inner_text()


def test_a_click_on_a_point_opens_its_plan(opened):
    found = opened("plan")
    assert found.page.locator("details.plan[open]").count() == 1
    found.page.mouse.click(*found.pixel("frontier", 90, 1.5))
    (name,) = found.page.locator("details.plan[open]").all()
    text = name.inner_text()
    assert "90.0 MiB, 1.5 s" in text
    assert "slower by 500 ms a step" in text
    assert "20.0 MiB more buys" in text
    found.check()


def test_a_click_on_a_heading_sorts_a_table(opened):
    found = opened("proof")
    table = found.page.locator("table.sortable").last
    first = table.locator("tbody tr:first-child td:first-child")
    assert first.inner_text() == "head.weight"
    heading = table.locator("th button", has_text="After two steps")
    heading.click()
    assert first.inner_text() == "encoder.weight"
    heading.click()
    assert first.inner_text() == "head.weight"
    assert table.locator("th[aria-sort=ascending]").count() == 1
    found.check()


def test_a_click_on_a_device_opens_what_is_known_of_it(opened) -> None:
    page = opened("cards")
    page.page.mouse.click(*page.pixel("frontier", 24, 2))

    assert page.page.locator("details.plan[open]").get_attribute("id") == "plan-1"
    page.page.locator("table.devices th button").nth(4).click()
    first = page.page.locator("table.devices tbody tr").first
    assert first.locator("td").first.inner_text() == "slow"
    page.check()
