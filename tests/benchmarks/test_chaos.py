"""Runs in which something is broken at random hold what is promised, and one that does not is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chaos_runs.minimise import smaller
from chaos_runs.stories import KINDS, OF_MEMORY, Fault, Story, draw
from chaos_runs.system_calls import Blow, can_be_watched

ROOT = Path(__file__).parents[2]
SEED = 20
needs_watching = pytest.mark.skipif(not can_be_watched(), reason="Linux on x86-64 alone")


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the harness as a person would; it forks, so it has a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@needs_watching
def test_configuration_files_survive_kills_and_bad_disks(tmp_path):
    """Trainings need seconds to begin with; files do not."""
    words = ("--only", "config", "--seed", str(SEED), "--json", str(tmp_path / "found.json"))
    done = chaos("--runs", "6", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["num_runs"], found["num_violations"]) == (6, 0)
    assert found["num_struck"] == 6


@needs_watching
@pytest.mark.slow
def test_what_is_promised_holds_in_a_few_runs_of_every_kind(tmp_path):
    done = chaos("--runs", "24", "--seed", str(SEED), "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_runs"] == 24
    assert found["num_violations"] == 0
    assert found["num_struck"] > 12
    assert len(found["by_kind"]) > 4


@needs_watching
@pytest.mark.slow
def test_a_file_that_is_torn_is_seen(tmp_path):
    """With a memfit whose plans are not written in one move, the harness goes red."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import memfit.files as files\n"
        "def torn(path, content):\n"
        "    path.write_text(content) if isinstance(content, str) else path.write_bytes(content)\n"
        "files.write_atomically = torn\n"
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--runs", "30", "--only", "kill", "--seed", str(SEED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--replay" in done.stdout


def test_a_number_is_a_story_for_good():
    for number in range(40):
        story = draw(number)
        assert story == draw(number)
        assert Story.from_json(json.loads(json.dumps(story.to_json()))) == story
    assert {draw(number).kind for number in range(400)} == set(KINDS)


def test_a_story_becomes_smaller_in_one_thing_at_a_time():
    story = next(each for each in map(draw, range(100)) if len(each.job.layers) > 2)
    fault = Fault(kind=OF_MEMORY, at=0.5)
    story = replace(story, lives=((fault, replace(fault, at=0.7)), (fault,)))
    found = [*smaller(story)]
    assert all(each != story for each in found)
    assert any(len(each.lives) == 1 for each in found)
    assert any(len(each.job.layers) == len(story.job.layers) - 1 for each in found)


WRITER = """
import os, sys
from pathlib import Path
from chaos_runs.processes import forked, wait_for
from chaos_runs.system_calls import Blow, Watch

path = Path(sys.argv[1])

def write():
    handle = os.open(path, os.O_WRONLY)
    rest = b"new!"
    try:
        while rest:
            rest = rest[os.write(handle, rest):]
    except OSError as error:
        return error.errno

watch = Watch(places=[path.parent], at=2, blow=Blow(sys.argv[2]))
child = forked(write, path.parent.parent / "said.txt", watch)
print(wait_for({child: watch}, 30.0).codes[child], watch.struck.name)
"""


@needs_watching
@pytest.mark.parametrize(
    ("blow", "code", "content"),
    [
        (Blow.KILL, -9, b"old"),
        (Blow.TEAR, -9, b"ned"),
        (Blow.FULL, 28, b"old"),
        (Blow.READ_ONLY, 30, b"old"),
        (Blow.SHORT, 0, b"new!"),
    ],
)
def test_a_call_that_writes_is_met(tmp_path, blow, code, content):
    """The second call: the first opens the file, which is there."""
    path = tmp_path / "work" / "file"
    path.parent.mkdir()
    path.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(path), blow],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
    )
    assert done.stdout.split() == [str(code), "write"]
    assert path.read_bytes() == content
