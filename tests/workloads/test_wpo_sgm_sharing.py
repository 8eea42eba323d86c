"""Whether centres are shared among devices is decided by room and by time, and is said."""

from __future__ import annotations

import argparse
import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.workloads.training import train_workload

from memfit.errors import NoPlanFitsError, UsageError
from memfit.units import MIB
from memfit_workloads import load_workload
from memfit_workloads.wpo_sgm import sharing as module
from memfit_workloads.wpo_sgm.sharing import sharing

SMALL = (
    *("--data", "8gaussians", "--train_kernel_size", "600", "--train_samples_size", "600"),
    *("--validation_samples_size", "20", "--test_samples_size", "20", "--niters", "2"),
    *("--hiddenunits", "8", "--depth", "2", "--eval_every", "1", "--num_generated", "4"),
)


def settings(*words: str):
    workload = load_workload("wpo-sgm")
    parser = argparse.ArgumentParser()
    workload.add_arguments(parser)
    return workload.settings_from(parser.parse_args([*SMALL, *words]), "memfit train wpo-sgm")


def found(monkeypatch, *words: str, seconds=(1.0, 2.0), is_gpu: bool = True):
    """Decide for a step that takes so many seconds on one device and on each of two; None: no."""

    def planned(_settings, _job, num_own: int):
        step_seconds = seconds[num_own < 600]
        if step_seconds is None:
            raise NoPlanFitsError(MIB, 2 * MIB, {}, ())
        return SimpleNamespace(planned=SimpleNamespace(step_seconds=step_seconds))

    monkeypatch.setattr(module, "plan_training", planned)
    monkeypatch.setattr(module, "devices", lambda _: ("cuda" if is_gpu else "cpu", "t4"))
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    return sharing(settings(*words), lambda num_ranks: (None, 600 // num_ranks))


def test_one_device_is_not_compared(monkeypatch):
    assert found(monkeypatch, "--no-gpu", is_gpu=False).line == ""
    assert found(monkeypatch, "--num_ranks", "1").num_ranks == 1
    assert found(monkeypatch, "--strategy", "chunked").num_ranks == 1


@pytest.mark.parametrize(
    ("seconds", "is_gpu", "num_ranks", "says"),
    [
        ((3.0, 2.0), True, 2, "2 ranks; predicted 2 s a step, 3 s on one device"),
        ((1.0, 2.0), True, 1, "one process; 1 s a step is fastest"),
        ((None, 2.0), True, 2, "no plan fits on one device (2.0 MiB)"),
        ((1.0, None), True, 1, "is fastest"),
        ((None, 2.0), False, 2, "no plan fits"),
        ((3.0, 2.0), False, 1, "ranks would do no more"),
    ],
)
def test_room_decides_and_on_gpus_time(monkeypatch, seconds, is_gpu, num_ranks, says):
    decided = found(monkeypatch, "--num_ranks", "2", seconds=seconds, is_gpu=is_gpu)
    assert decided.num_ranks == num_ranks
    assert says in decided.line


def test_the_thresholds_are_run_as_they_say(monkeypatch):
    for name, num_ranks in (("model_parallel", 2), ("chunked", 1)):
        monkeypatch.setattr(module, "chosen_by_thresholds", lambda *_, name=name: name)
        decided = found(monkeypatch, "--auto_policy", "thresholds")
        assert decided.num_ranks == num_ranks
        assert decided.line.endswith(f"the thresholds say {name}")


def test_samples_are_never_fewer_than_centres():
    parser = argparse.ArgumentParser()
    load_workload("wpo-sgm").add_arguments(parser)
    for centres, num_train in (("50", 500), ("2000", 2000)):
        args = parser.parse_args(["--train_kernel_size", centres])
        told = load_workload("wpo-sgm").settings_from(args, "memfit train wpo-sgm")
        assert told.data.num_train == num_train


@pytest.mark.slow
def test_a_log_grows_with_the_validations_and_few_pictures_are_drawn(tmp_path):
    output = Console(file=io.StringIO(), width=200)
    words = (
        *SMALL,
        "--data",
        "digits",
        "--train_kernel_size",
        "20",
        "--no-gpu",
        "--save",
        tmp_path,
    )
    result = train_workload("wpo-sgm", words, output)
    (log,) = tmp_path.rglob("training.log")
    lines = log.read_text().splitlines()
    assert lines[0] == "Memory estimates (one step, nothing streamed):"
    assert sum(line.startswith("Memory: ") for line in lines) == 2
    assert "allocated at the peak, none reserved (cpu)" in log.read_text()
    assert lines[-2].startswith("peak: predicted")
    assert list(tmp_path.rglob("nearest.png"))
    assert result["measured_peak_bytes"]


@pytest.mark.slow
def test_a_dry_run_of_several_ranks_starts_none(tmp_path):
    words = (*SMALL, "--strategy", "model_parallel", "--dry-run", "--no-gpu", "--save", tmp_path)
    assert train_workload("wpo-sgm", words)["predicted_peak_bytes"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("--data", "cifar10"), ("--num_ranks", "601")])
def test_what_every_rank_would_refuse_is_said_once(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"CIFAR-10|600 centres for 601 ranks"):
        train_workload("wpo-sgm", (*SMALL, *words, "--strategy", "model_parallel", "--no-gpu"))
