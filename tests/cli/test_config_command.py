"""``memfit config`` gives the guide's figures, exact products, and writes what it says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from tests.zoo.machines import machine_with

import memfit
from memfit import Job
from memfit.cli.main import main
from memfit.devices.detect import CudaDevice
from memfit.devices.occupancy import CardProcess, Occupancy
from memfit.units import GIB
from memfit_workloads import card_profile, card_settings

CONFIG = """# main
data_loader:
  batch_size: 22   # half of it
  num_workers: 4
training:
  trainer:
    precision: 16-mixed
    accumulate_grad_batches: 10  # to maintain the effective batch
"""
STAGE = "name: {name}\npositive_level: [2, 3]\nn_positives: 4   # rows\nn_negatives: 2\n"
FOLDERS = ("curriculum", "text_curriculum")


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """Stand in a folder with conf/ as the guide describes it, in both spellings of its folder."""
    monkeypatch.chdir(tmp_path)
    for folder in FOLDERS:
        (tmp_path / "conf" / folder).mkdir(parents=True)
        for number in range(1, 6):
            name = f"0{number}_stage"
            (tmp_path / "conf" / folder / f"{name}.yaml").write_text(STAGE.format(name=name))
        chain = "chain_name: c\nstages:\n  - name: 01_stage\n    max_epochs: 3\n"
        (tmp_path / "conf" / folder / "chain_default.yaml").write_text(chain)
    (tmp_path / "conf/config.yaml").write_text(CONFIG)
    return tmp_path / "conf"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_the_guides_row_stands_beside_an_exact_product(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    first, later = ask("config", "--gpu-memory", "23.6")["stages"]

    assert first["guide"]["batch_size"] == 45
    assert first["guide"]["accumulate_grad_batches"] == 5
    assert first["guide"]["effective_batch"] == 225
    assert first["guide"]["expected_bytes"] / GIB == pytest.approx(19.82, abs=0.005)
    assert (first["batch_size"], first["accumulate_grad_batches"]) == (32, 8)
    assert first["effective_batch"] == later["effective_batch"] == 256
    assert (first["n_positives"], first["n_negatives"]) == (32, 24)
    assert later["stage"] == "02-05"
    assert sum(first["breakdown_bytes"].values()) == first["expected_bytes"]


def test_the_guides_own_target_gives_the_guides_own_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--gpu-memory", "23.6", "--target-effective-batch", "225"]) == 0

    shown = capsys.readouterr().out
    assert "batch_size: 45\n  accumulate_grad_batches: 5\n" in shown
    for figure in ("200.7", "802.7", "17,554.4", "36.6", "1,500.0", "20,295.0"):
        assert f"{figure} MB" in shown
    assert "expected: 19.82 GB, 84% of the card" in shown
    assert "frozen weights gradients" in shown
    assert "prediction needs a card of its catalogue" in shown
    assert "less than half" not in shown


@pytest.mark.parametrize("memory", ["23.6", "24", "32", "40", "80"])
def test_512_on_two_devices_is_exactly_512(memory, tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    words = ["config", "--gpu-memory", memory, "--target-effective-batch", "512", "--devices", "2"]
    for stage in ask(*words)["stages"]:
        factors = ("batch_size", "num_devices", "accumulate_grad_batches")
        micro, devices, accumulation = (stage[name] for name in factors)
        assert micro * devices * accumulation == 512
        assert devices == 2
        assert micro <= stage["largest_batch_size"]


def test_a_target_that_the_devices_do_not_divide_ends_with_3_and_the_nearest(refuse):
    words = ["--gpu-memory", "80", "--target-effective-batch", "511", "--devices", "2"]
    line = refuse("config", *words, exit_code=3)

    assert "--target-effective-batch 510 (85 x 2 x 3 = 510)" in line
    assert "--target-effective-batch 512 (128 x 2 x 2 = 512)" in line


def test_little_use_and_a_printed_figure_that_differs_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["config", "--gpu-memory", "32"])
    shown = capsys.readouterr().out
    assert (
        "The guide prints 26.5 GB for stage 01 on such a card; its own formula gives 27.07" in shown
    )

    main(["config", "--gpu-memory", "80"])
    shown = capsys.readouterr().out
    assert "Stage 02-05 is expected to use 27% of the card, less than half" in shown
    assert "The guide prints" not in shown


def test_a_dry_run_shows_the_diff_and_writes_nothing(conf, capsys):
    before = contents(conf.parent)
    assert main(["config", "--gpu-memory", "23.6"]) == 0

    shown = capsys.readouterr().out
    assert "-  batch_size: 22   # half of it\n+  batch_size: 32   # half of it" in shown
    assert "--apply writes it" in shown
    assert contents(conf.parent) == before


def test_apply_writes_config_and_both_curricula_and_undo_gives_every_byte_back(conf, capsys):
    before = contents(conf)
    words = ["--target-effective-batch", "225", "--apply"]
    assert main(["config", "--gpu-memory", "23.6", *words]) == 0
    assert "Backup: " in capsys.readouterr().out

    config = yaml.safe_load((conf / "config.yaml").read_text())
    assert config["data_loader"] == {"batch_size": 45, "num_workers": 4}
    assert config["training"]["trainer"]["accumulate_grad_batches"] == 5
    for folder in FOLDERS:
        for number, wanted in ((1, (32, 24)), (2, (16, 8)), (5, (16, 8))):
            stage = yaml.safe_load((conf / folder / f"0{number}_stage.yaml").read_text())
            assert (stage["n_positives"], stage["n_negatives"]) == wanted
        name = f"{folder}/chain_default.yaml"
        assert (conf / name).read_bytes() == before[name]
    assert "# rows" in (conf / "curriculum/01_stage.yaml").read_text()

    assert main(["undo", str(conf)]) == 0
    assert contents(conf) == before


def test_devices_are_written_with_their_strategy(conf, ask):
    words = ["--target-effective-batch", "512", "--devices", "2", "--apply"]
    assert ask("config", "--gpu-memory", "80", *words)["is_written"]

    trainer = yaml.safe_load((conf / "config.yaml").read_text())["training"]["trainer"]
    assert trainer["devices"] == 2
    assert trainer["strategy"] == "ddp"
    assert trainer["accumulate_grad_batches"] == 2
    assert ask("config", "--gpu-memory", "80", *words)["is_written"] is False


def test_a_conf_without_stages_says_that_none_are_changed(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ["--gpu-memory", "40", "--config-path", str(tmp_path / "config.yaml")]

    assert main(["config", *words]) == 0
    assert "No stage files were found in curriculum and text_curriculum" in capsys.readouterr().out


def test_a_stage_without_its_keys_is_refused_whole(conf, refuse):
    (conf / "curriculum/03_stage.yaml").write_text("name: 03\nn_positive: 4\n")
    before = contents(conf)

    line = refuse("config", "--gpu-memory", "40", "--apply")
    assert "03_stage.yaml: a stage needs n_positives, and it has none. Nearest: n_positive" in line
    assert contents(conf) == before


def test_auto_without_a_card_says_what_to_do(refuse, monkeypatch):
    monkeypatch.setattr(card_settings, "host", machine_with)

    assert "Say how much memory the card has with --gpu-memory" in refuse("config", "--auto")


def test_auto_counts_what_others_hold_and_names_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    card = CudaDevice(name="Quadro RTX 6000", memory_bytes=int(23.65 * GIB))
    monkeypatch.setattr(card_settings, "host", lambda: machine_with(card))
    managed = SimpleNamespace(
        occupancy=lambda: Occupancy(card_bytes=10 * GIB, process_bytes=None),
        processes=lambda: (
            CardProcess(pid=1, used_bytes=9 * GIB),
            CardProcess(pid=2**22 + 1, used_bytes=None),
        ),
    )
    monkeypatch.setattr(card_settings.ManagedCard, "find", lambda uuid: managed)
    monkeypatch.setattr(card_settings, "_first_uuid", lambda: "GPU-1")

    monkeypatch.setattr(card_settings, "job_factory", lambda: None)

    assert main(["config", "--auto"]) == 0
    shown = capsys.readouterr().out
    assert "Quadro RTX 6000: 23.65 GB, 13.65 GB free" in shown
    assert "(process 1), 9.00 GiB" in shown
    assert "a process of another user or container" in shown
    assert "Other processes hold memory of the card" in shown
    assert "the guide's own rule: 28 x 9 = 252" in shown


@pytest.mark.slow
def test_a_lightning_training_of_the_workload_is_predicted_too(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    prediction = SimpleNamespace(process_bytes=12345)
    seen = []

    def predict(*made, device):
        seen.append((made, device))
        return prediction

    monkeypatch.setattr("memfit.integrations.lightning.predict", predict)
    made = ("trainer", "module", "data")
    monkeypatch.setattr(card_settings, "job_factory", lambda: lambda **_: made)

    stages = ask("config", "--device", "quadro-rtx-6000")["stages"]

    assert seen == [(made, "quadro-rtx-6000")] * 2
    assert [stage["predicted_bytes"] for stage in stages] == [12345, 12345]


def test_a_micro_batch_that_is_predicted_not_to_fit_gives_way_to_one_that_does(
    tmp_path, monkeypatch, ask
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "memfit.integrations.lightning.predict",
        lambda batch_size, *_, device: SimpleNamespace(process_bytes=(1 + batch_size) * GIB),
    )
    monkeypatch.setattr(
        card_settings, "job_factory", lambda: lambda *, batch_size, **_: (batch_size, None, None)
    )

    first = ask("config", "--device", "quadro-rtx-6000")["stages"][0]

    assert (first["batch_size"], first["accumulate_grad_batches"]) == (16, 16)
    assert first["too_large"] == [{"batch_size": 32, "predicted_bytes": 33 * GIB}]
    assert first["expected_bytes"] == first["predicted_bytes"] == 17 * GIB


@pytest.mark.slow
def test_profile_runs_a_step_here_and_compares(
    tmp_path, monkeypatch, ask, refuse, capsys, regression_job
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(card_profile, "host", machine_with)

    def made(*, batch_size, **_):
        return replace(regression_job, batch_size=batch_size)

    words = ["config", "--gpu-memory", "23.6", "--profile"]
    monkeypatch.setattr(card_profile, "step_factory", lambda: None)
    assert "whose packages are missing" in refuse(*words)

    monkeypatch.setattr(card_profile, "step_factory", lambda: made)
    first, second = ask(*words)["profiles"]
    assert (first["stage"], first["device"], second["stage"]) == ("01", "cpu", "02-05")
    assert first["batch_size"] == 32
    job = replace(regression_job, batch_size=32)
    assert first["measured_bytes"] == memfit.measure(job).peak_allocated_bytes
    assert first["predicted_bytes"] == memfit.predict(job).peak_allocated_bytes
    assert main(words) == 0
    assert "Stage 01, 32 anchors, one step on this CPU: measured" in capsys.readouterr().out


@pytest.mark.slow
def test_profile_takes_the_process_on_a_card(tmp_path, monkeypatch, ask, regression_job):
    monkeypatch.chdir(tmp_path)
    card = CudaDevice(name="Quadro RTX 6000", memory_bytes=int(23.65 * GIB))
    monkeypatch.setattr(card_profile, "host", lambda: machine_with(card))
    monkeypatch.setattr(card_profile, "current_device_name", lambda: "quadro-rtx-6000")
    monkeypatch.setattr(card_profile, "step_factory", lambda: lambda **_: regression_job)
    monkeypatch.setattr("memfit.measure", lambda job, device: SimpleNamespace(process_bytes=777))
    predicted = memfit.predict(regression_job, device="quadro-rtx-6000")

    for each in ask("config", "--gpu-memory", "23.6", "--profile")["profiles"]:
        assert each["device"] == "quadro-rtx-6000"
        assert (each["measured_bytes"], each["predicted_bytes"]) == (777, predicted.process_bytes)


@pytest.mark.slow
def test_a_step_that_the_cpu_does_not_hold_is_not_run(
    tmp_path, monkeypatch, refuse, regression_job
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(card_profile, "host", machine_with)
    monkeypatch.setattr(card_profile, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr(card_profile, "step_factory", lambda: lambda **_: regression_job)
    monkeypatch.setattr("memfit.measure", lambda *_, **__: pytest.fail("a step was run"))

    line = refuse("config", "--gpu-memory", "24", "--profile")

    assert "a step of stage 01 with 32 anchors takes" in line
    assert "of which 1000 B are free" in line


@pytest.mark.slow
def test_memfits_prediction_stands_beside_the_formula_where_the_workload_gives_its_job(
    tmp_path, monkeypatch, ask, regression_job
):
    monkeypatch.chdir(tmp_path)
    asked = []

    def job_for(*, config_path, batch_size, n_negatives) -> Job:
        asked.append((config_path, batch_size, n_negatives))
        return regression_job

    factory = ModuleType("memfit_workloads.naics.card_job")
    factory.job_for = job_for
    monkeypatch.setitem(sys.modules, "memfit_workloads.naics", ModuleType("memfit_workloads.naics"))
    monkeypatch.setitem(sys.modules, "memfit_workloads.naics.card_job", factory)

    found = ask("config", "--device", "quadro-rtx-6000")

    assert asked == [(None, 32, 24), (None, 64, 8)]
    assert all(stage["predicted_bytes"] > 0 for stage in found["stages"])
    assert found["card"]["title"] == "NVIDIA Quadro RTX 6000 24 GB"
