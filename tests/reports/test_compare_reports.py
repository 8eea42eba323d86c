"""Comparisons on paper: the page, the terminal, and the folders of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reports.run_samples import FACTS, make_steps, write_run
from tests.zoo.predictions import make_prediction
from tests.zoo.terminal import rendered

from memfit.cli.main import main
from memfit.peak_changes.comparison import Comparison, Tolerance, default_tolerance
from memfit.peak_changes.moments import KnownLine, LineBlocks, Moment, StepMoments
from memfit.peak_changes.saved import prediction_document
from memfit.reports.compare_html import compare_html
from memfit.reports.compare_text import compare_report
from memfit.reports.compared_sides import read_side
from memfit.units import MIB

HOSTILE = "<script>alert(1)</script>[bold]\x1b[31m"


def save(path: Path, held: dict[str, int], *, code: str = "y = self.act(x)") -> Path:
    """Save a prediction whose lines hold bytes, a block each."""
    blocks = [
        LineBlocks(
            source_line=line, module=f"h.{place}", category="temporaries", num_bytes=n, num_blocks=1
        )
        for place, (line, n) in enumerate(held.items())
    ]
    lines = [KnownLine(source_line=line, function="Net.f", code=code) for line in held]
    moment = Moment(phase="forward", source_line="", blocks=blocks)
    prediction = make_prediction(sum(held.values()), budget_bytes=400 * MIB, fits=True)
    document = prediction_document(
        "net.py:job", prediction.to_json(), StepMoments(lines=lines, moments=[moment])
    )
    path.write_text(json.dumps(document))
    return path


def comparison(before: Path, after: Path) -> Comparison:
    sides = [read_side(path, path.name) for path in (before, after)]
    return Comparison(before=sides[0], after=sides[1], tolerance=default_tolerance(*sides))


def run_of(folder: Path, peak_bytes: int | None, host_bytes: int = 300 * MIB) -> Path:
    """Write the folder of a run with a peak."""
    steps = make_steps(
        3,
        peak_allocated_bytes=lambda _: peak_bytes,
        predicted_peak_bytes=lambda _: 90 * MIB,
        host_bytes=lambda _: host_bytes,
    )
    return write_run(folder, replace(FACTS, title=folder.name), steps, ())


def test_the_page_holds_what_files_say_as_text_and_asks_nothing(tmp_path: Path) -> None:
    before = save(tmp_path / "a.json", {"net.py:3": 10 * MIB}, code="y = x")
    after = save(tmp_path / "b.json", {"net.py:3": 10 * MIB, "new.py:4": 5 * MIB}, code=HOSTILE)
    page = compare_html(comparison(before, after))

    assert "&lt;script&gt;alert(1)&lt;/script&gt;[bold][31m" in page
    assert "<script" not in page
    assert "\x1b" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert 'class="verdict bad"' in page


def test_the_terminal_shows_names_as_they_are(tmp_path: Path) -> None:
    before = save(tmp_path / "a.json", {"net.py:3": 10 * MIB}, code="y = x")
    after = save(tmp_path / "b.json", {"net.py:3": 10 * MIB, "new.py:4": 5 * MIB}, code=HOSTILE)
    text = rendered(compare_report(comparison(before, after), top=1))

    assert "<script>alert(1)</script>[bold][31m" in text
    assert "\x1b" not in text


def test_lines_past_the_limit_are_added_up(tmp_path: Path) -> None:
    before = save(tmp_path / "a.json", {"net.py:3": MIB})
    after = save(tmp_path / "b.json", {f"n{i}.py:1": i * MIB for i in range(1, 9)}, code="z")
    text = rendered(compare_report(comparison(before, after), top=2))

    assert "(7 others) +20,971,520 bytes" in text


# --- Runs ---


def test_measured_and_predicted_peaks_of_runs_are_set_beside_each_other(tmp_path: Path) -> None:
    found = comparison(run_of(tmp_path / "one", 100 * MIB), run_of(tmp_path / "two", 110 * MIB))
    text = rendered(compare_report(found, top=3))

    assert found.is_regression
    assert text.startswith("The measured peak rises by 10.0 MiB, from 100.0 MiB to 110.0 MiB")
    assert "predicted peak" in text
    assert "Runs do not note the lines" in text


def test_a_measured_peak_may_differ_a_little(tmp_path: Path) -> None:
    found = comparison(run_of(tmp_path / "one", 100 * MIB), run_of(tmp_path / "two", 101 * MIB - 1))

    assert not found.is_regression
    assert replace(found, tolerance=Tolerance()).is_regression


def test_a_run_is_held_against_a_prediction(tmp_path: Path) -> None:
    saved = save(tmp_path / "a.json", {"net.py:3": 100 * MIB})
    text = rendered(compare_report(comparison(saved, run_of(tmp_path / "run", 100 * MIB)), top=3))

    assert "The peak stays as it was: 100.0 MiB." in text
    assert "One is predicted and the other measured" in text


def test_the_memory_of_the_host_is_not_compared_with_that_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_of(tmp_path / "one", 100 * MIB), run_of(tmp_path / "two", None)

    assert main(["compare", str(two), str(two)]) == 0
    assert "The measured host peak stays as it was: 300.0 MiB." in capsys.readouterr().out
    assert main(["compare", str(one), str(two)]) == 2
    assert "name two that tell the same" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
