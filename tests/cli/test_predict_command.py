"""``memfit predict``: jobs and step builders, one device or several, and refusals that help."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo.predictions import make_prediction
from tests.zoo.terminal import rendered

from memfit import predict_step
from memfit.cli.main import main
from memfit.errors import JobFunctionError, RecordingError, StepBuilderError
from memfit.figures import Advice, Certainty, Holder, Interval, Topic
from memfit.job import BuildsJobError, Job, StepBuilder, load_target
from memfit.prediction.predict import predict
from memfit.reports.text import prediction_table
from memfit.reports.wording import advice_sentence, fits_sentence, interval_words, verdict
from memfit.units import GIB, MIB

SCRIPT = """
import torch
from memfit import Job


def build():
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 512, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    return step


def on_cpu():
    model = torch.nn.Linear(512, 512)
    return lambda: model(torch.randn(2, 512)).sum().backward()


def looks_at_values():
    model = torch.nn.Linear(8, 8).cuda()

    def step():
        scores = model(torch.randn(2, 8, device="cuda"))
        if scores.sum() > 0:
            scores = 2 * scores
        scores.sum().backward()

    return step


def needs_argument(path, size=3):
    return path


def gives_nothing():
    pass


def gives_step_with_argument():
    return lambda batch: batch


def loads_weights():
    return torch.load("/no/such/weights.pt")


def fails():
    raise ValueError("it is broken.")


def normalised():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))


def make_job(model=lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))):
    return Job(
        model=model,
        batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4096,
    )


job = make_job()
with_batch_norm = make_job(normalised)
with_weights = make_job(loads_weights)
number = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write the script; return the words for a name in it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return lambda name: f"{path}:{name}"


# --- What is loaded ---


def test_a_target_is_a_job_or_a_function_that_is_not_called_yet(script) -> None:
    builder = load_target(script("fails"))

    assert isinstance(load_target(script("job")), Job)
    assert isinstance(builder, StepBuilder)
    with pytest.raises(ValueError, match="broken"):
        builder()


def test_a_builder_of_a_job_says_so_when_it_is_called(script) -> None:
    builder = load_target(script("make_job"))

    assert isinstance(builder, StepBuilder)
    with pytest.raises(BuildsJobError):
        builder()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("needs_argument", "it needs an argument (path)"),
        ("number", "it is a int"),
        ("Job", "it is a class"),
        ("gives_nothing", "it returned a NoneType"),
        ("gives_step_with_argument", "the step that it returned needs an argument (batch)"),
    ],
)
def test_what_builds_no_step_is_refused_with_the_reason(script, name: str, reason: str) -> None:
    def load_and_build() -> None:
        builder = load_target(script(name))
        assert isinstance(builder, StepBuilder)
        builder()

    with pytest.raises(StepBuilderError, match="does one training step") as caught:
        load_and_build()
    assert reason in str(caught.value)


# --- What is answered ---


def test_a_script_for_cuda_is_predicted_as_it_is(ask, script) -> None:
    found = ask("predict", script("build"), "--device", "t4")

    assert found["batch_size"] is None
    assert found["by_category"]["parameters"] >= 512 * 512 * 4
    assert found["by_category"]["optimizer state"] >= 2 * 512 * 512 * 4
    assert set(found["intervals"]) == {"allocated", "reserved", "process"}
    assert found["intervals"]["process"]["low_bytes"] < found["process_bytes"]
    assert sum(term["num_bytes"] for term in found["terms"]) == found["process_bytes"]
    assert "script.py:" in found["largest"][0]["source_line"]
    assert found["largest"][0]["phase"]
    assert found["verdict"] == "yes"
    assert all(entry["text"] for entry in found["advice"])
    assert found["smallest_memory_bytes"] <= found["process_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "job"])
def test_python_and_the_command_agree_about_the_allocator(ask, script, name: str) -> None:
    target = load_target(script(name))
    predict_it = predict if isinstance(target, Job) else predict_step
    usual, large = (
        predict_it(target, "t4", allocator=text).peak_reserved_bytes
        for text in (None, "large_segment_size_mb:64")
    )
    words = [script(name), "--device", "t4"]

    assert usual < large
    assert ask("predict", *words)["peak_reserved_bytes"] == usual
    assert (
        ask("predict", *words, "--allocator", "large_segment_size_mb:64")["peak_reserved_bytes"]
        == large
    )


@pytest.mark.slow
def test_a_function_that_gives_a_job_is_predicted_as_that_job(ask, script) -> None:
    by_function = ask("predict", script("make_job"), "--device", "t4")

    assert by_function["batch_size"] == 4096
    by_name = ask("predict", script("job"), "--device", "t4")
    assert by_function["peak_allocated_bytes"] == by_name["peak_allocated_bytes"]


@pytest.mark.slow
def test_every_device_gets_a_recording_of_its_own(ask, script) -> None:
    devices = ("t4", "a100-40gb", "cpu")
    words = [word for name in devices for word in ("--device", name)]
    found = ask("predict", script("job"), *words)

    job = load_target(script("job"))
    assert {entry["device"] for entry in found} == set(devices)
    seconds = [entry["step_seconds"] for entry in found]
    assert seconds == sorted(seconds), "the fastest that fit come first"
    assert [entry["peak_allocated_bytes"] for entry in found] == [
        predict(job, entry["device"]).peak_allocated_bytes for entry in found
    ]
    assert {entry["largest_micro_batch_size"] for entry in found} == {4096}
    assert all(entry["largest_batch_size"] > 4096 for entry in found)


@pytest.mark.slow
def test_a_comparison_names_the_largest_micro_batch_that_fits(ask, script) -> None:
    words = [script("job"), "--device", "t4", "--device", "cpu", "--budget-of", "allocated"]
    plain = max(each["peak_allocated_bytes"] for each in ask("predict", *words))
    found = ask("predict", *words, "--budget", f"{int(0.93 * plain)}B")

    on_cpu, on_card = sorted(found, key=lambda entry: entry["device"])
    assert found == [on_cpu, on_card], "where it fits comes first"
    assert on_card["over_bytes"] > 0 > on_cpu["over_bytes"]
    assert (on_card["fits"], on_cpu["fits"]) == (False, True)
    assert 0 < on_card["largest_micro_batch_size"] < 4096 == on_cpu["largest_micro_batch_size"]


@pytest.mark.slow
def test_a_comparison_says_why_there_is_no_micro_batch(ask, script) -> None:
    words = ["--device", "t4", "--device", "cpu", "--budget", "100KiB"]
    found = ask("predict", script("with_batch_norm"), *words, exit_code=3)

    assert [entry["largest_micro_batch_size"] for entry in found] == [None, None]
    assert "batch normalisation" in found[0]["largest_micro_batch_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 14])
def test_as_many_blocks_are_named_as_are_asked_for(ask, script, count: int) -> None:
    assert (
        len(ask("predict", script("job"), "--device", "t4", "--top", str(count))["largest"])
        == count
    )


@pytest.mark.slow
def test_a_page_and_a_picture_are_written(script, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    page, picture = tmp_path / "a" / "step.html", tmp_path / "step.png"
    words = [script("build"), "--device", "t4", "--html", str(page), "--png", str(picture)]

    assert main(["predict", *words]) == 0
    assert f"Wrote {page}." in capsys.readouterr().out.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text("utf-8")
    for part in ("script.py:build", "<svg", "cuBLAS workspaces", "Peak reserved"):
        assert part in text
    bare = text.replace("<wbr>", "")
    assert re.search(r"script\.py:\d+<", bare), "the lines behind the largest blocks"
    assert "http-equiv" in text
    assert "{%" not in text


@pytest.mark.slow
def test_the_screen_says_what_to_type_next_and_verbose_the_rest(script, capsys) -> None:
    command = ["predict", script("job"), "--device", "t4"]
    assert main([*command, "--budget", "10MiB"]) == 3
    screen = capsys.readouterr().out
    assert screen.startswith("Does not fit the budget of 10.0 MiB")
    plan = f"`memfit plan {script('job')} --device t4 --budget 10MiB` finds the fastest way"
    assert "".join(plan.split()) in "".join(screen.split())
    assert "Terms" not in screen
    assert main([*command, "--verbose"]) == 0
    assert "Terms" in capsys.readouterr().out
    assert main([*command, "--depth", "1"]) == 0
    assert main([*command, "--depth", "0"]) == 2


# --- What is refused ---


def test_a_plan_is_refused_for_a_step_of_ones_own(refuse, script, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("memfit_plan: 1\nstrategies: []\n")
    line = refuse("predict", script("build"), "--device", "t4", "--plan", str(plan), exit_code=2)

    assert "--plan changes how memfit runs a memfit.Job" in line


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--top", "0"], "--top must be at least 1"),
        (["--device", "t4", "--device", "cpu", "--png", "a.png"], "are for one device"),
        (["--device", "t4,zz*"], "No device is named like 'zz*'"),
        (["--allocator", "nonsense:1"], "nonsense"),
    ],
)
def test_words_that_make_no_sense_are_refused(refuse, script, words, fragment) -> None:
    assert fragment in refuse("predict", script("job"), *words, exit_code=2)


def test_code_that_leaves_the_gpu_empty_is_refused(refuse, script) -> None:
    line = refuse("predict", script("on_cpu"), "--device", "t4")

    assert "nothing was placed on the GPU" in line
    assert ".cuda()" in line


def test_code_for_cuda_is_told_to_name_a_gpu(refuse, script) -> None:
    line = refuse("predict", script("build"))

    assert "script.py, line 7" in line
    assert "Name the GPU" in line


@pytest.mark.slow
def test_code_that_looks_at_values_is_answered_and_its_line_listed(ask, script) -> None:
    answer = ask("predict", script("looks_at_values"), "--device", "t4")

    lines = [each["source_line"] for each in answer["answers"]]
    assert [line.rpartition("/")[2] for line in lines] == [
        f"script.py:{_line_of('if scores.sum() > 0:')}"
    ]
    assert answer["peak_allocated_bytes"] > 0


@pytest.mark.slow
def test_code_that_fails_is_named_with_its_line(refuse, script) -> None:
    line = refuse("predict", script("fails"), "--device", "t4")

    assert f"ValueError: it is broken (script.py, line {_line_of('it is broken')})." in line


@pytest.mark.parametrize(
    ("name", "error"), [("loads_weights", RecordingError), ("with_weights", JobFunctionError)]
)
def test_missing_weights_are_said_to_be_needless(script, name: str, error) -> None:
    target = load_target(script(name))

    predict_it = predict if isinstance(target, Job) else predict_step
    with pytest.raises(error, match=r"No weights are needed.*from_config"):
        predict_it(target, "t4")


def _line_of(text: str) -> int:
    return next(n for n, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)


# --- How it is shown ---

ON_CARD = make_prediction(
    10 * GIB,
    device="t4",
    batch_size=None,
    peak_reserved_bytes=12 * GIB,
    process_bytes=13 * GIB,
    first_step_peak_bytes=9 * GIB,
    step_seconds=0.5,
    certainty=Certainty.TABLE,
    intervals={
        "allocated": Interval(low_bytes=1000 * MIB, high_bytes=11 * GIB),
        "process": Interval(low_bytes=12 * GIB, high_bytes=14 * GIB),
    },
    fragmentation_fraction=0.125,
    smallest_memory_bytes=11 * GIB,
    largest=(
        Holder(
            num_bytes=GIB,
            category="saved activations",
            module="encoder",
            operator="_scaled_dot_product_efficient_attention_backward",
            source_line="models/decoder.py:31",
            phase="forward",
        ),
    ),
    budget_bytes=15 * GIB,
    budget_of="process",
    fits=True,
)


def shown(renderable: Any) -> str:
    return " ".join(rendered(renderable).split())


def test_a_prediction_on_a_card_is_shown_with_intervals_and_places() -> None:
    advice = Advice(
        topic=Topic.GUESSED_TERM, num_bytes=GIB, part_fraction=0.07, subject="kernel scratch"
    )
    output = shown(prediction_table(ON_CARD, [advice]))

    for part in (
        "process 13.00 GiB table 12.00 to 14.00 GiB",
        "survives in 11.00 GiB",
        "fragmentation 12.5 %",
        "forward, models/decoder.py:31",
        "What would change the answer - kernel scratch: 1.00 GiB (7 % of the process) is a guess.",
    ):
        assert part in output
    assert "batch size" not in output


@pytest.mark.parametrize(
    ("budget_bytes", "word"),
    [
        (11 * GIB, "no"),
        (12 * GIB, "uncertain"),
        (13 * GIB, "uncertain"),
        (14 * GIB - 1, "uncertain"),
        (14 * GIB, "yes"),
    ],
)
def test_a_budget_inside_the_interval_makes_the_answer_uncertain(
    budget_bytes: int, word: str
) -> None:
    judged = replace(ON_CARD, budget_bytes=budget_bytes, fits=budget_bytes >= 13 * GIB)

    assert verdict(judged) == word
    assert ("uncertainly" in fits_sentence(judged, budget_bytes)) == (word == "uncertain")


def test_an_interval_has_one_unit() -> None:
    assert interval_words(ON_CARD.intervals["allocated"]) == "0.98 to 11.00 GiB"
    assert interval_words(Interval(low_bytes=1, high_bytes=2)) == "1 to 2 B"
    assert interval_words(None) == ""


@pytest.mark.parametrize("topic", list(Topic))
def test_every_piece_of_advice_is_a_sentence(topic: Topic) -> None:
    advice = Advice(topic=topic, num_bytes=MIB, part_fraction=0.5, subject="16")

    assert advice_sentence(advice).endswith(".")
    assert "1.0 MiB" in advice_sentence(advice) or topic is Topic.MICRO_BATCH


DECIDES_AT_ITS_TOP = """
import torch, memfit
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32

def loss(model, batch):
    with torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
        return model(batch.to(device)).float().mean()

job = memfit.Job(model=lambda: nn.Linear(256, 256), batch=lambda n: torch.randn(n, 256), loss=loss,
                 optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=512)
"""


@pytest.mark.slow
def test_a_file_that_decides_on_a_gpu_at_its_top_sees_the_virtual_card(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "decides.py").write_text(DECIDES_AT_ITS_TOP)
    (tmp_path / "job.py").write_text("from decides import job\n")
    monkeypatch.chdir(tmp_path)
    command = ["predict", "job.py:job", "--device", "cpu", "--device", "t4", "--json"]
    assert main(command) == 0
    on_card, on_cpu = json.loads(capsys.readouterr().out)
    assert "in float16" in str(on_card["notes"])
    assert "in float16" not in str(on_cpu["notes"])
    assert not torch.cuda.is_available()
    assert main(["plan", "job.py:job", "--device", "t4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "t4"
