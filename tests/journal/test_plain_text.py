"""A text that asks for more than a machine has is refused in a line, and at once."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from memfit.configfile.document import read_document
from memfit.configfile.plan_settings import read_plan_settings
from memfit.devices.calibration import read_calibration
from memfit.errors import ConfigFileError, DataError, MemfitError, PlanFileError
from memfit.journal.folder import read_journal
from memfit.journal.plain_text import parsed_json, parsed_toml, read_plain
from memfit.journal.plain_yaml import parsed_yaml
from memfit.journal.timeline import read_timeline
from memfit.reports.training import read_metrics, read_training
from memfit.session.block_names import expand_names
from memfit.strategies.plan import Plan

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
DEEP = "[" * 50_000
DEEP_MAPS = "".join(f"{' ' * n}a:\n" for n in range(400))
DIGITS = "9" * 200_000
MANY = "- a\n" * 200_000
HOSTILE_YAML = {
    "aliases": f"memfit_plan: 1\n{LAUGHS}",
    "deep": f"memfit_plan: 1\nstrategies: {DEEP}",
    "deep maps": f"memfit_plan: 1\n{DEEP_MAPS}",
    "closed": f"memfit_plan: 1\nstrategies: {'[' * 3000}{']' * 3000}",
    "digits": f"memfit_plan: 1\nranks: {DIGITS}",
    "hexadecimal": f"memfit_plan: 1\nranks: 0x{DIGITS}",
    "many": f"memfit_plan: 1\nstrategies:\n{MANY}",
    "twins": "memfit_plan: 1\nmemfit_plan: 1\n",
    "objects": "memfit_plan: !!python/object/apply:os.system [true]\n",
    "unhashable": "? [a]\n: b\n",
    "zero": "memfit_plan: 1\n\0",
    "self": "&a [*a]\n",
    "empty": "",
    "large": "#" * 2_000_000,
}
HOSTILE_JSON = {"deep": DEEP, "objects": '{"a":' * 50_000, "digits": DIGITS, "cut": '{"a": ['}


def within_a_second(began_seconds: float) -> bool:
    return time.process_time() - began_seconds < 1


@pytest.mark.parametrize("kind", HOSTILE_YAML)
@pytest.mark.parametrize("load", [Plan.load, read_plan_settings])
def test_a_plan_file_that_asks_for_too_much_is_refused_in_a_line(tmp_path, kind, load):
    path = tmp_path / "plan.yaml"
    path.write_text(HOSTILE_YAML[kind])
    began_seconds = time.process_time()
    with pytest.raises(PlanFileError) as caught:
        load(path)
    assert within_a_second(began_seconds)
    assert len(str(caught.value)) < 600 + len(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["deep", "deep maps", "closed", "many", "zero", "self", "large"])
def test_a_configuration_that_asks_for_too_much_is_refused(tmp_path, kind):
    path = tmp_path / "config.yaml"
    path.write_text(HOSTILE_YAML[kind])
    began_seconds = time.process_time()
    with pytest.raises(ConfigFileError):
        read_document(path)
    assert within_a_second(began_seconds)


@pytest.mark.parametrize("kind", HOSTILE_JSON)
@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_configurations_in_json_and_toml_are_bounded_as_well(tmp_path, kind, suffix):
    path = tmp_path / f"config{suffix}"
    path.write_text(HOSTILE_JSON[kind] if suffix == ".json" else f"a = {HOSTILE_JSON[kind]}")
    with pytest.raises(ConfigFileError):
        read_document(path)


@pytest.mark.parametrize(
    "text", ["(" * 60 + ")" * 60, "[" * 300, "a" + ".b" * 9000, "-" * 9000 + "1"]
)
def test_a_configuration_in_python_is_bounded(tmp_path, text):
    path = tmp_path / "config.py"
    path.write_text(f"a = {text}\n")
    with suppress(ConfigFileError):
        read_document(path)


@pytest.mark.parametrize("text", [f"a = {DEEP}", f"a = {DIGITS}", f"{'a.' * 30_000}a = 1", MANY])
def test_toml_is_bounded(tmp_path, text):
    path = tmp_path / "cpu.toml"
    path.write_text(text)
    began_seconds = time.process_time()
    with pytest.raises(DataError):
        read_calibration(path)
    assert within_a_second(began_seconds)


@pytest.mark.parametrize("text", [*HOSTILE_JSON.values(), "[]", "null", '{"a": NaN}', "\0"])
def test_a_journal_of_nonsense_is_refused_or_left_out(tmp_path, text):
    for name in ("run.json", "reason.json", "timeline.json", "training.json"):
        (tmp_path / name).write_text(text)
        for read in (read_journal, read_timeline, read_training):
            with pytest.raises(MemfitError) if reads(read, name) else no_error():
                read(tmp_path)
        (tmp_path / name).unlink()
    for name in ("steps.jsonl", "events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes(text.encode() + b"\n\xff\n")
    assert read_journal(tmp_path).steps == ()
    assert read_journal(tmp_path).events == ()
    assert read_metrics(tmp_path) in ([], [{"a": pytest.approx(float("nan"), nan_ok=True)}])


def reads(read, name: str) -> bool:
    """Return whether a reader reads a file of that name, or misses the journal without it."""
    own = {read_timeline: "timeline.json", read_training: "training.json"}
    return own.get(read, name) == name


class no_error:  # noqa: N801 - it stands where ``raises`` stands
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "plan.yaml")
    with pytest.raises(ValueError, match="no regular file"):
        read_plain(tmp_path / "plan.yaml")


@pytest.mark.parametrize("last", ["99999999999", "9" * 18, "9" * 5000])
def test_a_range_of_blocks_ends_at_the_first_that_is_unknown(last):
    known = ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match="no module named"):
        expand_names([f"layers.0-{last}"], known)


def test_plain_texts_are_read_as_ever():
    assert parsed_yaml("a: [1, {b: c}]\nd: &x e\n") == {"a": [1, {"b": "c"}], "d": "e"}
    assert parsed_json('{"a": [1]}') == {"a": [1]}
    assert parsed_toml("a = [1]") == {"a": [1]}
    assert Path(__file__).read_text("utf-8") == read_plain(Path(__file__))
