"""Leaks of many kinds are found, and named by holder and line."""

import gc
import json

import pytest

from memfit.runtime.leaks import LeakFinder

from .leak_programs import load

PLANTED = load("planted").PLANTED


@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.run.__name__)
def test_a_planted_leak_is_named(program) -> None:
    gc.collect()
    told = []
    finder = LeakFinder(told.append, overhead_fraction=1.0)

    program.run(finder)

    assert tuple(told) == finder.findings
    (event,) = told
    assert event.kind == program.kind
    assert event.holder == program.holder or event.holder.endswith(f".{program.holder}")
    assert event.holder in event.sentence
    assert event.total_growth_bytes > 0
    if program.line:
        assert program.line in load("training").text_of_line(event.source_line)


@pytest.mark.parametrize("name", ["metric_collection", "metric_ended_by_finish"])
def test_a_metric_is_found_within_two_validation_passes_at_the_default_budget(name: str) -> None:
    finder = LeakFinder()

    getattr(load("planted_steps"), name)(finder)

    (event,) = finder.findings
    assert event.holder == "model.head.metrics.auroc.preds"
    assert "target" in event.sentence
    assert "reset()" in event.sentence


def test_there_are_at_least_fourteen_kinds_of_programs() -> None:
    assert len({program.run for program in PLANTED}) >= 14


def test_the_documentation_has_the_figures_of_the_benchmark() -> None:
    page = load("page")
    text = page.PAGE.read_text("utf-8")
    figures = json.loads(page.RESULT.read_text("utf-8"))

    assert text == page.with_table(text, figures), "run: python benchmarks/leak_programs/page.py"
