"""`memfit devices --new` writes a card's file, from flags or from answers, and never by surprise."""

import json
import sys

import pytest

from memfit.cli.main import main
from memfit.devices.catalogue import load_device

FIGURES = {
    "--memory": "24564MiB",
    "--bandwidth": "936GB/s",
    "--float32": "35.6",
    "--half": "71 TFLOPS",
    "--compute-capability": "8.6",
}


def words(**changes) -> list[str]:
    figures = FIGURES | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [word for pair in figures.items() if pair[1] is not None for word in pair]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my-card.toml"


def new(*more: str) -> int:
    return main(["devices", "--new", "my-card.toml", *more])


def test_figures_from_flags_make_a_file_that_is_a_device(path, capsys):
    assert new(*words(link="63GB/s"), "--title", "Karte „grün“") == 0
    assert "--device my-card.toml" in capsys.readouterr().out
    device = load_device("my-card.toml")
    assert device.title == "Karte „grün“"
    assert device.compute_capability == "8.6"
    assert device.memory_bytes == 24564 * 1024**2
    assert device.value("memory_bandwidth_bytes_per_second") == 936e9
    assert device.value("link_bytes_per_second") == 63e9
    assert device.matrix_flops_per_second("float32") == 35.6e12
    assert device.matrix_flops_per_second("bfloat16") == 71e12
    certain = {name: fact.certainty for name, fact in device.facts.items()}
    assert certain.pop("context_bytes") == certain.pop("launch_seconds") == "guess"
    assert set(certain.values()) == {"table"}
    assert main(["devices", "my-card.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "my-card.toml"


def test_what_is_not_told_is_a_guess_and_an_old_card_has_no_bfloat16(path, capsys):
    assert new("--json", *words(compute_capability="7.5")) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["path"] == "my-card.toml"
    facts = written["device"]["facts"]
    assert facts["link_bytes_per_second"]["certainty"] == "guess"
    assert "matrix_float16_flops_per_second" in facts
    assert "matrix_bfloat16_flops_per_second" not in facts


def test_a_file_that_is_there_is_replaced_only_by_force(path, capsys):
    path.write_text("mine")
    assert new(*words()) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert new("--force", *words()) == 0
    assert load_device("my-card.toml").memory_bytes


def test_without_a_terminal_the_missing_flags_are_named(path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert new(*words(half=None, memory=None)) == 2
    shown = capsys.readouterr().err
    assert "Missing: --memory, --half." in shown
    assert "--bandwidth" not in shown
    assert not path.exists()


def answer(monkeypatch, *answers):
    given = iter(answers)

    def read(self, prompt="", **_):
        asked.append(str(prompt))
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console.input", read)
    return asked


def test_on_a_terminal_only_what_is_missing_is_asked_for(path, capsys, monkeypatch):
    asked = answer(monkeypatch, "a lot", "24GB", "71")
    assert new(*words(memory=None, half=None)) == 0
    assert [each.partition(",")[0].split()[0] for each in asked] == ["Memory", "Memory", "float16"]
    assert "not a size" in capsys.readouterr().out
    assert load_device("my-card.toml").memory_bytes == 24_000_000_000


@pytest.mark.parametrize("answers", [(), ("no", "no", "no", "24GB")], ids=["end", "nonsense"])
def test_without_an_answer_nothing_is_written(path, capsys, monkeypatch, answers):
    answer(monkeypatch, *answers)
    assert new(*words(memory=None)) == 2
    assert "no answer for --memory" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (words(memory="much"), "--memory: 'much' is not a size"),
        (words(memory="1KiB"), "memory_bytes.value is 1024"),
        (words(bandwidth="fast"), "--bandwidth:"),
        (words(float32="0"), "--float32: '0' is no rate"),
        (words(half="-3"), "--half"),
        (words(compute_capability="ada"), "write it as 8.6"),
        (words(link="x"), "--link"),
        (["--title", "\x1b[2J", *words()], "one line to be read"),
        (["t4", *words()], "not both"),
    ],
)
def test_figures_that_make_no_sense_are_refused_and_nothing_is_written(path, capsys, more, message):
    assert new(*more) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert not path.exists()


@pytest.mark.parametrize("name", ["my-card", ".toml", "my-card.yaml"])
def test_only_a_toml_file_is_written(path, capsys, name):
    assert main(["devices", "--new", name, *words()]) == 2
    assert "writes a TOML file" in capsys.readouterr().err


def test_figures_without_a_file_are_refused(capsys):
    assert main(["devices", "--memory", "24GB"]) == 2
    assert "--new FILE.toml" in capsys.readouterr().err


def test_a_hostile_file_ends_a_prediction_with_one_line(path, capsys):
    path.write_text("facts = " + "[" * 20_000)
    assert main(["predict", f"{__file__}:job", "--device", "my-card.toml"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "my-card.toml: it is not valid TOML" in shown
