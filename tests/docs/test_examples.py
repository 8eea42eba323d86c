"""Every example runs, stays small and shows what it says."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from memfit import plan, predict
from memfit.cli.main import load_command, main
from memfit.job import load_job
from memfit.units import parse_bytes

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRANSFORMER = f"{ROOT / 'examples' / 'transformer.py'}:job"
BUDGET_BYTES = parse_bytes("220MiB")


def output_of(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run an example as a script and give what it prints."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def size_in(output: str, label: str) -> int:
    """Find the size behind a label."""
    found = re.search(rf"^{label}: +([\d.]+) (\w+)$", output, re.MULTILINE)
    assert found, f"no {label} in:\n{output}"
    return parse_bytes(found[1] + found[2])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_small_and_listed_in_the_documentation(example: Path) -> None:
    assert len(example.read_text("utf-8").splitlines()) < 100
    assert f"examples/{example.name}" in (ROOT / "docs" / "index.md").read_text("utf-8")


@pytest.mark.slow
def test_the_transformer_needs_a_plan_for_its_budget_and_an_exact_one_is_found() -> None:
    job = load_job(TRANSFORMER)
    found = plan(job, budget=BUDGET_BYTES)

    assert predict(job).peak_allocated_bytes > BUDGET_BYTES
    assert found.strategies
    assert found.numerics == "exact"
    assert found.prediction.peak_allocated_bytes <= BUDGET_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predict", "plan", "measure"])
def test_the_example_in_a_commands_help_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(load_command(name).example)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    if "--plan" in words:
        plan(load_job(TRANSFORMER), budget=BUDGET_BYTES).save("plan.yaml")

    assert main(words[1:]) == 0
    assert "MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_the_training_loop_keeps_its_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of("training_loop.py", monkeypatch, capsys)

    predicted, measured = size_in(output, "predicted"), size_in(output, "measured")
    assert output.count("loss") == 4
    assert measured <= BUDGET_BYTES < size_in(output, "plain")
    assert predicted == pytest.approx(measured, rel=0.02)


def test_the_card_settings_are_those_of_the_guide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of("card_settings.py", monkeypatch, capsys)

    for row in ("45 x 5 = 225, 32 positives, 24 negatives, 19.8 GB (84.0%)", "82 x 3 = 246"):
        assert f"stage 01: {row}" in output
    assert "stage 02-05: 128 x 2 = 256, 16 positives, 8 negatives, 21.4 GB (26.8%)" in output
    assert output.endswith("with safety_margin=0.75: batch_size 39\n")


@pytest.mark.slow
def test_ragged_tokens_are_exact_as_a_total_and_refused_as_a_mean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total, mean = output_of("ragged_tokens.py", monkeypatch, capsys).splitlines()

    assert total.startswith("Total")
    assert float(total.split()[-1]) < 1e-12
    assert mean.startswith("a mean over tokens: refused.")


@pytest.mark.slow
def test_many_entities_are_streamed_in_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of("many_entities.py", monkeypatch, capsys)

    assert "loss-chunking" in output
    assert size_in(output, "measured") <= size_in(output, "plain") / 2
    assert float(output.split()[-1]) < 1e-12
