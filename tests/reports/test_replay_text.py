"""A replayed snapshot and a run's end, as they are shown in a terminal."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
from tests.reports.run_samples import leaked
from tests.snapshots.recorded_programs import steady_training, varying_lengths
from tests.zoo.terminal import rendered

from memfit.cli.main import main
from memfit.reports.replay_text import replay_report, run_replay_report
from memfit.snapshots.replaying import replay
from memfit.snapshots.run_folder import replay_run
from memfit.units import GIB


def test_a_failure_in_pieces_is_shown_with_what_would_have_served() -> None:
    text = rendered(replay_report(replay(varying_lengths(fill=0.8).snapshot())))

    assert text.startswith("Out of memory on device 0, entry 310 of 311\n")
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True would have served this request." in text
    assert "77.0 MiB less" in " ".join(text.split())
    for line in ("project/model.py:34 forward", "project/train.py:88 main"):
        assert line in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["expandable_segments:True"][1] == "yes"
    assert rows["max_split_size_mb:128"][1] in {"yes", "no"}


def test_a_request_too_large_for_every_setting_says_by_how_much() -> None:
    text = " ".join(rendered(replay_report(replay(steady_training().snapshot()))).split())

    assert "None of the settings tried would have served this request." in text
    assert "150.0 MiB less in this one request would have." in text
    assert "150.0 MiB short of the segment needed" in text
    assert "more lines" not in text


def test_a_replay_that_is_not_the_record_says_so_before_anything_else_to_know() -> None:
    content = varying_lengths(fill=0.8).snapshot()
    content["device_traces"][0][-1]["size"] = 512
    text = rendered(replay_report(replay(content)))

    assert "does NOT end as the record does" in " ".join(text.split())
    assert "Whether other settings would have helped is not known." in text


@pytest.mark.parametrize(
    ("content", "heading"),
    [
        ({"segments": [], "device_traces": []}, "What was held on device 0"),
        ({"segments": steady_training().snapshot()["segments"]}, "What was held on device 0"),
        ({**steady_training().snapshot(), "device_traces": [[]]}, "What was held on device 0"),
    ],
)
def test_a_snapshot_without_history_is_shown_too(content, heading) -> None:
    assert rendered(replay_report(replay(content))).startswith(heading)


def test_names_from_a_file_are_no_markup() -> None:
    content = steady_training().snapshot()
    for entry in content["device_traces"][0]:
        entry["frames"] = [{"filename": "[bold]a.py[/x]", "line": 1, "name": "[red]f"}]

    assert "x]:1 [red]f" in rendered(replay_report(replay(content)))


def test_a_run_that_ended_for_want_of_memory_is_shown(tmp_path: Path) -> None:
    text = rendered(run_replay_report(replay_run(leaked(tmp_path))))

    assert "failed step" in text
    assert "What kept growing" in text
    assert "which blocks were free" in " ".join(text.split())


# --- The command ---


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["replay", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "rank0_memory_snapshot.pickle"
    path.write_bytes(pickle.dumps(steady_training().snapshot()))
    return path


def test_the_command_shows_and_writes_the_same(snapshot: Path, capsys) -> None:
    code, shown, _ = run(capsys, str(snapshot))
    assert (code, shown.splitlines()[0]) == (0, "Out of memory on device 0, entry 217 of 218")
    code, written, _ = run(capsys, str(snapshot), "--json")

    assert json.loads(written) == json.loads(json.dumps(replay(snapshot).to_json()))


def test_limit_device_and_settings_are_taken(snapshot: Path, capsys) -> None:
    words = ("--limit", "1GiB", "--device", "0", "--settings", "max_split_size_mb:64", "--json")
    found = json.loads(run(capsys, str(snapshot), *words)[1])

    assert found["limit_bytes"] == GIB
    assert found["outcomes"][-1]["settings"] == "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--device", "9"), 1, "device 9 is not in it; there: 0"),
        (("--limit", "much"), 2, "--limit: 'much' is not a size"),
        (("--max-file", "1KiB"), 1, "more than 1.0 KiB"),
        (("--settings", "of_2030:1"), 2, "no setting 'of_2030'"),
    ],
)
def test_what_makes_no_sense_is_one_line(snapshot: Path, capsys, words, code, said) -> None:
    found, shown, error = run(capsys, str(snapshot), *words)

    assert (found, shown) == (code, "")
    assert said in error
    assert error.count("\n") == 1


class Bad:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize(
    "kind", ["gadget", "compressed gadget", "empty", "missing", "folder", "bomb"]
)
def test_a_hostile_file_is_one_line_and_exit_code_1(tmp_path: Path, capsys, kind) -> None:
    path, made = tmp_path / "it.pickle", tmp_path / "made"
    gadget = pickle.dumps({"segments": [], "device_traces": [[Bad(made)]]})
    content = {
        "gadget": gadget,
        "compressed gadget": gzip.compress(gadget),
        "empty": b"",
        "bomb": gzip.compress(b"\x80\x04" + b"\0" * 2**22),
    }
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content[kind])
    code, shown, error = run(capsys, str(path), "--max-file", "1MiB")

    assert (code, shown) == (1, "")
    assert error.startswith("memfit: error: ")
    assert error.count("\n") == 1
    assert not made.exists()
