"""``memfit compare``: what a change of the code does to the peak, on the CPU and on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit import devices
from memfit.cli import compare
from memfit.cli.main import main

BASE = """
import torch
from torch import nn

import memfit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.last = nn.Linear(512, 256)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x)


job = memfit.Job(
    model=Net,
    batch=lambda size: torch.randn(size, 256),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=1024,
)
"""
GATED = BASE.replace(
    "        return self.last(x)",
    "        gate = torch.sigmoid(x)\n        x = x * gate\n        return self.last(x)",
)
MOVED = BASE.replace("class Net", "# Lines below move.\n\n\nclass Net").replace(
    "        return", "        # And this one further.\n        return"
)
SMALLER = BASE.replace("512", "384")
HIDDEN_BYTES = 1024 * 512 * 4
"""What `gate` takes, which backward keeps; the product, which the last layer keeps, takes as much."""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def memfit(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; give its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        exit_code = main(list(words))
        out, errors = capsys.readouterr()
        return exit_code, out, errors

    return run


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predict versions of a model, each in a folder of its own, on the CPU and on a card."""
    folder = tmp_path_factory.mktemp("versions")
    cases = [("base", BASE, "cpu"), ("gated", GATED, "cpu"), ("moved", MOVED, "cpu")]
    cases += [("smaller", SMALLER, "cpu"), ("base", BASE, "t4"), ("gated", GATED, "t4")]
    for name, code, device in cases:
        job = folder / name / "net.py"
        job.parent.mkdir(exist_ok=True)
        job.write_text(code)
        file = folder / f"{name}-{device}.json"
        assert main(["predict", f"{job}:job", "--device", device, "--save", str(file)]) == 0
    return folder


@pytest.fixture
def compared(memfit: Run, versions: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Compare two of the versions; give the exit code and the JSON."""

    def run(before: str, after: str, *words: str) -> tuple[int, dict[str, Any]]:
        files = [str(versions / f"{name}.json") for name in (before, after)]
        exit_code, out, _ = memfit("compare", *files, *words, "--json")
        return exit_code, json.loads(out)

    return run


# --- What is found ---


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_a_tensor_that_backward_keeps_is_named_with_its_line_and_bytes(compared, device) -> None:
    exit_code, found = compared(f"base-{device}", f"gated-{device}")

    gate, product = found["by_line"]
    assert (gate["source_line"], gate["function"]) == ("gated/net.py:16", "Net.forward")
    assert (gate["code"], product["code"]) == ("gate = torch.sigmoid(x)", "x = x * gate")
    assert gate["by_category"] == product["by_category"] == {"saved activations": HIDDEN_BYTES}
    assert gate["is_new"]
    assert found["change_bytes"] == 2 * HIDDEN_BYTES
    assert found["verdict"] == "higher"
    assert exit_code == 3


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_what_lives_at_the_peak_adds_up_to_it(versions, device) -> None:
    saved = json.loads((versions / f"gated-{device}.json").read_text())

    files = {line["source_line"].partition(":")[0] for line in saved["lines"]}
    highest = max(saved["moments"], key=lambda moment: moment["num_bytes"])
    assert sum(block["num_bytes"] for block in highest["blocks"]) == saved["peak_allocated_bytes"]
    assert {moment["phase"] for moment in saved["moments"]} == {"forward", "backward"}
    assert files == {"gated/net.py"}, "what started the command is no code that is trained"


def test_the_text_begins_with_the_verdict_and_names_the_line(memfit, versions) -> None:
    files = [str(versions / f"{name}-cpu.json") for name in ("base", "gated")]
    exit_code, out, _ = memfit("compare", *files, "--html", str(versions / "page.html"))

    assert out.startswith("The predicted peak rises by 4.0 MiB, from ")
    assert "gated/net.py:16 in Net.forward (new)" in out
    assert "+2,097,152 bytes: saved activations" in out
    assert "gate = torch.sigmoid(x)" in (versions / "page.html").read_text()
    assert exit_code == 3


def test_a_line_that_only_moved_is_no_change(compared, versions) -> None:
    exit_code, found = compared("base-cpu", "moved-cpu")
    lines = [
        json.loads((versions / f"{n}-cpu.json").read_text())["lines"] for n in ("base", "moved")
    ]

    assert {each["source_line"][-2:] for each in lines[0]} != {
        each["source_line"][-2:] for each in lines[1]
    }
    assert (found["by_line"], found["by_module"], found["verdict"]) == ([], [], "same")
    assert exit_code == 0


def test_a_smaller_model_passes_and_what_went_is_named(compared) -> None:
    exit_code, found = compared("base-cpu", "smaller-cpu")

    edited = {line["code_before"]: line["by_category"] for line in found["by_line"]}
    assert edited["self.first = nn.Linear(256, 512)"] == {"parameters": -128 * 257 * 4}
    assert edited["self.last = nn.Linear(512, 256)"] == {"parameters": -128 * 256 * 4}
    assert sum(line["change_bytes"] for line in found["by_line"]) == found["change_bytes"] < 0
    assert (exit_code, found["verdict"]) == (0, "lower")


def test_another_device_is_said(compared) -> None:
    _, found = compared("base-cpu", "base-t4")

    assert any("cpu before and t4 after" in note for note in found["notes"])


# --- What is allowed ---


@pytest.mark.parametrize(
    ("tolerance", "expected"), [("4MiB", 0), ("3MiB", 3), ("60%", 0), ("10 %", 3), ("0", 3)]
)
def test_a_peak_may_rise_by_the_tolerance(compared, tolerance, expected) -> None:
    exit_code, found = compared("base-cpu", "gated-cpu", "--tolerance", tolerance)

    assert exit_code == expected
    assert found["verdict"] == ("within tolerance" if expected == 0 else "higher")


def test_a_budget_that_the_second_breaks_is_a_regression_within_the_tolerance(compared) -> None:
    words = ("base-cpu", "gated-cpu", "--tolerance", "60%", "--budget")

    assert compared(*words, "1GiB")[0] == 0
    exit_code, found = compared(*words, "12MiB")
    assert (exit_code, found["fits"], found["fitted_before"]) == (3, False, True)
    assert any("does not fit the budget of 12.0 MiB" in each for each in found["sentences"])


# --- What is refused ---


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file or folder"),
        (b"", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"3", "it holds a int, not a JSON object"),
        (b"[{}, {}]", "it holds a list of 2"),
        (b"{}", "memfit_prediction, the version of its format, is missing"),
        (b'{"memfit_prediction": 2}', "of format 2, and this memfit reads format 1"),
        (b'{"memfit_prediction": "\\u001b[31m1"}', "of format [31m1, and"),
        (b'{"memfit_prediction": 1}', "it is no whole prediction: "),
        (b'{"memfit_prediction": 1, "step_seconds": NaN}', "NaN is no number"),
    ],
)
def test_a_broken_file_is_refused_in_a_line(memfit, versions, tmp_path, content, says) -> None:
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_bytes(content)
    exit_code, out, errors = memfit("compare", str(versions / "base-cpu.json"), str(file))

    assert (exit_code, out, errors.count("\n")) == (1, "", 1)
    assert f"{file}: " in errors
    assert says in errors
    assert errors.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("peak_allocated_bytes",), -1, "peak_allocated_bytes is -1"),
        (("peak_allocated_bytes",), True, "peak_allocated_bytes is True"),
        (("first_step_peak_bytes",), 10**30, "not a whole number"),
        (("step_seconds",), "fast", "step_seconds is 'fast'"),
        (("by_category",), [1], "by_category is a list"),
        (("by_module",), {"head": 1.5}, "by_module of 'head' is 1.5"),
        (("fits",), "no", "fits is neither"),
        (("budget_of",), "money", "budget_of is none of"),
        (("moments",), [], "moments is empty"),
        (("moments", 0, "blocks", 0, "num_bytes"), "12", "num_bytes is '12'"),
        (("lines", 0, "code"), None, "None stands where a text is needed"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_a_line(
    memfit, versions, tmp_path, path, value, says
) -> None:
    content = json.loads((versions / "base-cpu.json").read_text())
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(content))
    exit_code, _, errors = memfit("compare", str(versions / "base-cpu.json"), str(file))

    assert (exit_code, errors.count("\n")) == (1, 1)
    assert says in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tolerance", "much"], "'much' is not a size"),
        (["--tolerance", "12"], "has no unit"),
        (["--top", "0"], "--top must be at least 1"),
        (["--device", "t4"], "--device is for what is predicted now"),
        (["--", "--lr", "3"], "-- is for what is predicted now"),
    ],
)
def test_words_that_make_no_sense_are_refused(memfit, versions, words, says) -> None:
    file = str(versions / "base-cpu.json")
    exit_code, _, errors = memfit("compare", file, file, *words)

    assert exit_code == 2
    assert says in errors


# --- Jobs that are predicted now ---


@pytest.mark.slow
def test_versions_with_modules_of_one_name_are_predicted_apart(memfit, tmp_path) -> None:
    for name, width in (("base", 64), ("head", 96)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "width.py").write_text(f"WIDTH = {width}\n")
        (folder / "net.py").write_text("from width import WIDTH\n" + BASE.replace("512", "WIDTH"))
    jobs = [f"{tmp_path / name / 'net.py'}:job" for name in ("base", "head")]
    exit_code, out, errors = memfit("compare", *jobs, "--json")

    assert errors == ""
    found = json.loads(out)
    assert exit_code == 3
    changed = {row["module"]: row["change_bytes"] for row in found["by_module"]}
    assert changed["last"] == 32 * 256 * 4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have no prediction made; list the words of those that were asked for."""
    seen: list[list[str]] = []

    def refuse(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(words)
        errors = "loading\nmemfit: error: The file net.py has no job 'x'. It has: job.\n"
        return subprocess.CompletedProcess(words, 1, "", errors)

    monkeypatch.setattr(compare.subprocess, "run", refuse)
    return seen


def test_a_job_is_predicted_on_the_device_of_the_other_side(memfit, versions, asked) -> None:
    file = str(versions / "base-t4.json")
    memfit("compare", file, "net.py:x", "--budget", "1GiB", "--steps", "4", "--", "--lr", "3")

    (words,) = asked
    assert words[:5] == [sys.executable, "-P", "-m", "memfit", "predict"]
    assert {"net.py:x", "--device=t4", "--budget=1GiB", "--steps=4"} < set(words)
    assert words[-3:] == ["--", "--lr", "3"]


@pytest.mark.slow
def test_a_device_of_ones_own_is_compared_without_its_file(
    memfit, versions, tmp_path, monkeypatch
) -> None:
    own = tmp_path / "own.toml"
    text = (Path(devices.__file__).parent / "data" / "t4.toml").read_text("utf-8")
    own.write_text(text, "utf-8")
    job, saved = f"{versions / 'base' / 'net.py'}:job", tmp_path / "saved.json"
    assert memfit("predict", job, "--device", str(own), "--save", str(saved))[0] == 0
    own.unlink()
    seen: list[str] = []

    def predicted_elsewhere(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (option,) = (word for word in words if word.startswith("--device="))
        seen.append(Path(option.partition("=")[2]).read_text("utf-8"))
        target = Path(words[words.index("--save") + 1])
        content = json.loads(saved.read_text("utf-8"))
        target.write_text(json.dumps({**content, "device": option.partition("=")[2]}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(compare.subprocess, "run", predicted_elsewhere)
    exit_code, out, _ = memfit("compare", str(saved), job)

    assert (exit_code, seen) == (0, [text])
    assert "Other devices" not in out


def test_a_job_that_cannot_be_predicted_is_told_in_a_line(memfit, versions, asked) -> None:
    exit_code, _, errors = memfit("compare", str(versions / "base-cpu.json"), "net.py:x")

    assert exit_code == 1
    assert errors == ("memfit: error: net.py:x: The file net.py has no job 'x'. It has: job.\n")


def test_several_devices_are_not_saved_in_one_file(memfit, versions) -> None:
    job = f"{versions / 'base' / 'net.py'}:job"
    exit_code, _, errors = memfit(
        "predict", job, "--device", "t4", "--device", "cpu", "--save", "both.json"
    )

    assert exit_code == 2
    assert "--save and --png are for one device" in errors
