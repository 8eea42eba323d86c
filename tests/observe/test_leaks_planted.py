"""Leaks of many kinds are found, and named by holder and line."""

import json
import subprocess
import sys

import pytest
from leak_programs import run_all
from leak_programs.planted import PLANTED


def found_in(kind: str, *words: str) -> dict:
    """Run programs of a kind in a process of their own, and give what was told of each."""
    words = [sys.executable, run_all.__file__, kind, *words]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_planted_leaks_are_named() -> None:
    found = found_in("planted")
    wrong = {}
    for program in PLANTED:
        name = program.run.__name__
        if len(found[name]) != 1:
            wrong[name] = f"{len(found[name])} findings"
            continue
        (event,) = found[name]
        holder = event["holder"]
        is_right = (
            event["kind"] == program.kind
            and (holder == program.holder or holder.endswith(f".{program.holder}"))
            and holder in event["sentence"]
            and event["total_growth_bytes"] > 0
            and (not program.line or program.line in event["line_text"])
        )
        if not is_right:
            wrong[name] = event
    assert not wrong
    assert len(PLANTED) >= 14


@pytest.mark.slow
def test_clean_runs_raise_no_alarm() -> None:
    found = found_in("clean")
    assert {name: events for name, events in found.items() if events} == {}
    assert len(found) >= 22


@pytest.mark.slow
def test_a_metric_is_found_within_two_validation_passes_at_the_default_share() -> None:
    names = ("metric_collection", "metric_ended_by_finish")
    found = found_in("planted", "0.005", *names)
    for name in names:
        (event,) = found[name]
        assert event["holder"] == "model.head.metrics.auroc.preds"
        assert "target" in event["sentence"]
        assert "reset()" in event["sentence"]
