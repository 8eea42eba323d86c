"""The tests of the leak finder, in a process of their own.

The finder looks at everything that Python holds. After a thousand other tests that is a hundred
times what it is in a fresh process, and takes minutes.
"""

import json
import os
from pathlib import Path

import pytest
from tests.zoo.processes import run_python

pytestmark = pytest.mark.slow

NAMES = ("leaks_alone", "leaks_heldout_alone", "leak_programs_alone")
ALONE = [Path(__file__).with_name(f"{name}.py") for name in NAMES]


def test_the_leak_finder_by_itself() -> None:
    # In their order: the programs, which leave much behind, come last.
    plugins = ("no:xdist", "no:cacheprovider", "no:randomly")
    words = ["-m", "pytest", "-q", *(f"-p{name}" for name in plugins), *map(str, ALONE)]
    known = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = run_python(*words, cwd=ALONE[0].parents[2], env=known)
    assert done.returncode == 0, done.stdout


DEFAULT_SHARE = """
import json
from leak_programs.planted_steps import metric_collection, metric_ended_by_finish
from memfit import LeakFinder

for program in (metric_collection, metric_ended_by_finish):
    finder = LeakFinder()
    program.run(finder)
    print(json.dumps([(event.holder, event.sentence) for event in finder.findings]))
"""


def test_a_metric_is_found_within_two_validation_passes_at_the_default_share() -> None:
    """Without pytest's own objects, which take most of the time that there is."""
    folder = ALONE[0].parents[2] / "benchmarks"
    done = run_python("-c", DEFAULT_SHARE, cwd=folder, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        ((holder, sentence),) = json.loads(line)
        assert holder == "model.head.metrics.auroc.preds"
        assert "target" in sentence
        assert "reset()" in sentence
