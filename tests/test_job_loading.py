"""A user's file is read before it is imported, and trains nothing while it is."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.zoo.job_files import LINEAR_JOB

from memfit.cli.main import main
from memfit.job import load_job

TRAINING = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open("trained.txt", "a").write("step")
"""
SCRIPT = "import torch\nopen('ran.txt', 'w').close()\n" + TRAINING
FUNCTION = f"def main():\n{textwrap.indent(TRAINING, '    ')}\n    return job\n"
WAYS_TO_TRAIN = {
    "loop": TRAINING,
    "function": FUNCTION + "main()\n",
    "neighbour": "import neighbour_that_trains\n",
    "caught": f"try:\n{textwrap.indent(TRAINING, '    ')}\nexcept:\n    pass\n",
    "exits": f"import sys\ntry:\n{textwrap.indent(TRAINING, '    ')}\nfinally:\n    sys.exit()\n",
    "thread": FUNCTION
    + "import threading\nthread = threading.Thread(target=main)\nthread.start()\nthread.join()\n",
    "by hand": "weights = torch.ones(4, requires_grad=True)\n"
    "gradient, = torch.autograd.grad(weights.sum(), weights)\nopen('trained.txt', 'w')\n",
    "update alone": "weights = torch.nn.Parameter(torch.ones(4))\nweights.grad = weights.detach()\n"
    "torch.optim.SGD([weights], lr=0.1).step()\nopen('trained.txt', 'w')\n",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "neighbour_that_trains.py"):
        Path(name).write_text(SCRIPT)
    Path("job.py").write_text(LINEAR_JOB)


@pytest.mark.parametrize(
    "words",
    [
        "measure script.py",
        "plan script.py",
        "plan script.py:job",
        "verify script.py:job",
        "table script.py:job",
        "predict script.py:job",
    ],
)
def test_a_name_that_is_not_there_is_refused_before_anything_is_run(words, capsys) -> None:
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert "No memfit.Job is seen in it" in error
    assert not Path("ran.txt").exists()


def test_of_two_jobs_one_has_to_be_named_before_anything_is_run(capsys) -> None:
    Path("job.py").write_text(f"open('ran.txt', 'w').close()\n{LINEAR_JOB}\nother = job\n")

    assert main(["measure", "job.py"]) == 1
    assert "does not say which job is meant. The jobs there: job, other." in capsys.readouterr().err
    assert not Path("ran.txt").exists()


@pytest.mark.parametrize(
    "source",
    [
        "from job import job as wanted",
        "from names import *",
        f"exec({LINEAR_JOB!r}); globals()['wanted'] = job",
        "def make():\n    global wanted\n    from job import job as wanted\nmake()",
        "if True:\n    from job import job\n    wanted = job",
        "def wanted():\n    from job import job\n    return job",
    ],
)
def test_what_only_a_run_of_the_file_can_tell_is_found(source) -> None:
    Path("names.py").write_text("from job import job as wanted\n")
    Path("other.py").write_text(source)
    assert load_job("other.py:wanted").batch_size == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", WAYS_TO_TRAIN)
def test_a_file_that_trains_when_it_is_imported_is_ended_at_once(way, capsys) -> None:
    source = LINEAR_JOB + WAYS_TO_TRAIN[way]
    Path("unguarded.py").write_text(source)

    assert main(["plan", "unguarded.py:job", "--device", "t4"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "unguarded.py: importing it trains (line " in error
    assert "__main__" in error
    assert not Path("trained.txt").exists()


@pytest.mark.parametrize("command", ["measure", "verify", "plan", "table"])
def test_a_function_that_trains_is_ended_at_once(command, capsys) -> None:
    Path("guarded.py").write_text(LINEAR_JOB + FUNCTION)

    assert main([command, "guarded.py:main"]) == 1
    assert "guarded.py:main trains (line " in capsys.readouterr().err
    assert not Path("trained.txt").exists()


@pytest.mark.slow
def test_the_training_of_a_function_is_predicted_as_a_script_is(capsys) -> None:
    Path("guarded.py").write_text(LINEAR_JOB + FUNCTION)

    assert main(["predict", "guarded.py:main", "--json"]) == 0
    assert '"phase": "steady step"' in capsys.readouterr().out
    assert not Path("trained.txt").exists()


ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["top", "function"])
def test_a_file_gets_its_own_arguments_and_not_those_of_the_command(place, capsys) -> None:
    asked = ARGUMENTS + "width = parser.parse_args().width\n"
    source = LINEAR_JOB.replace("Linear(4, 2)", "Linear(4, width)")
    if place == "function":
        source = f"def make():\n{textwrap.indent(asked + source, '    ')}\n    return job\n"
    else:
        source = asked + source
    Path("arguments.py").write_text(source)
    name = "make" if place == "function" else "job"

    assert main(["measure", f"arguments.py:{name}", "--", "--width", "7"]) == 0
    capsys.readouterr()
    assert main(["measure", f"arguments.py:{name}"]) == 1
    error = capsys.readouterr().err
    assert "arguments.py: error: the following arguments are required: --width" in error
    assert "ends the program with sys.exit(2) (line " in error.splitlines()[-1]


@pytest.mark.slow
def test_a_plan_that_is_kept_is_one_for_the_same_arguments(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "cache"))
    source = ARGUMENTS + LINEAR_JOB.replace("Linear(4, 2)", "Linear(4, parser.parse_args().width)")
    Path("arguments.py").write_text(source)
    peaks = []
    for width in ("70", "7000"):
        assert main(["plan", "arguments.py:job", "--json", "--", "--width", width]) == 0
        peaks.append(capsys.readouterr().out)
    assert peaks[0] != peaks[1]


@pytest.mark.parametrize("command", ["plan", "measure"])
def test_a_file_that_ends_the_program_is_no_success(command, capsys) -> None:
    Path("ending.py").write_text(LINEAR_JOB + "import sys\nsys.exit()\n")

    assert main([command, "ending.py:job"]) == 1
    assert "importing it ends the program with sys.exit(None) (line " in capsys.readouterr().err


@pytest.mark.slow
def test_autograd_and_optimizers_are_as_before_once_a_file_was_refused() -> None:
    import torch

    for source in (TRAINING, ""):
        Path("unguarded.py").write_text(LINEAR_JOB + source)
        main(["measure", "unguarded.py:job"])
    weights = torch.nn.Parameter(torch.ones(2))
    weights.sum().backward()
    torch.optim.SGD([weights], lr=1.0).step()
    assert weights.tolist() == [0.0, 0.0]
