"""``memfit apply`` shows, writes and says what it left out; ``memfit undo`` puts it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.cli.main import main

PLAN = """memfit_plan: 1
device: t4
strategies:
- name: fused-attention
- name: eight-bit-optimizer
- name: micro-batching
  micro_batch_size: 15
prediction: {batch_size: 225, peak_allocated_bytes: 1000}
"""
CONFIG = """data_loader:
  batch_size: 45   # as on the RTX 6000

training:
  trainer:
    accumulate_grad_batches: 5
"""


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    Path("conf").mkdir()
    Path("conf/config.yaml").write_text(CONFIG)
    return Path("conf/config.yaml")


def test_a_dry_run_shows_a_diff_and_writes_nothing(config, capsys):
    assert main(["apply", "plan.yaml", str(config)]) == 0

    shown = capsys.readouterr().out
    assert "-  batch_size: 45   # as on the RTX 6000\n+  batch_size: 15   # as" in shown
    assert "45 x 1 x 5 = 225 becomes 15 x 1 x 15 = 225" in shown
    assert "Left out: fused-attention (it is an argument of the model" in shown
    assert "Left out: eight-bit-optimizer" in shown
    assert "takes more than was predicted" in shown
    assert "Counted as one device" in shown
    assert "--yes writes it" in shown
    assert config.read_text() == CONFIG
    assert sorted(path.name for path in Path().iterdir()) == ["conf", "plan.yaml"]


def test_what_is_written_is_put_back_byte_for_byte(config, capsys):
    assert main(["apply", "plan.yaml", "conf", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "Backup: " in shown
    assert "config.yaml.backup-1" in shown
    assert "accumulate_grad_batches: 15\n" in config.read_text()

    assert main(["undo"]) == 0

    assert config.read_text() == CONFIG
    assert "Put back" in capsys.readouterr().out
    assert main(["undo"]) == 1


@pytest.mark.parametrize("path", [".", "conf", "conf/config.yaml"])
def test_undo_finds_the_history_from_any_path_below(path, config):
    main(["apply", "plan.yaml", str(config), "--yes"])
    assert main(["undo", path]) == 0
    assert config.read_text() == CONFIG


def test_undo_of_a_folder_leaves_an_apply_to_other_files_alone(config, refuse, capsys):
    main(["apply", "plan.yaml", str(config), "--yes"])
    capsys.readouterr()
    written = config.read_text()
    Path("other").mkdir()

    assert "was to " in refuse("undo", "other")
    assert config.read_text() == written


def test_undo_refuses_what_was_changed_by_hand_unless_asked_to(config, refuse, capsys):
    main(["apply", "plan.yaml", str(config), "--yes"])
    capsys.readouterr()
    config.write_text("by: hand\n")

    assert "has changed since the plan was applied" in refuse("undo")
    assert main(["undo", "--even-if-changed"]) == 0
    assert config.read_text() == CONFIG


def test_the_exit_code_is_3_where_there_are_no_exact_factors(config, refuse):
    line = refuse("apply", "plan.yaml", str(config), "--effective-batch", "220", exit_code=3)

    assert "--micro-batch 11 keeps it (11 x 1 x 20 = 220)" in line
    assert "--effective-batch 225" in line


@pytest.mark.parametrize("word", ["0", "-2", "two", "1.5"])
def test_a_number_of_devices_is_a_whole_one(word, config, capsys):
    assert main(["apply", "plan.yaml", str(config), "--devices", word]) == 2
    assert "no whole number of at least 1" in capsys.readouterr().err


def test_json_says_what_was_written_and_where_the_backups_are(config, ask):
    found = ask("apply", "plan.yaml", str(config), "--devices", "3", "--yes")

    assert found["is_written"]
    assert found["batch_before"]["effective_size"] == 675
    assert found["batch_after"] == {
        "micro_batch_size": 15,
        "accumulation": 15,
        "num_devices": 3,
        "effective_size": 675,
    }
    assert [Path(each).read_text() for each in found["backups"]] == [CONFIG]
    (file,) = found["files"]
    assert [(each["key"], each["before"], each["after"]) for each in file["changes"]] == [
        ("data_loader.batch_size", 45, 15),
        ("training.trainer.accumulate_grad_batches", 5, 15),
    ]
    assert ask("undo")["number"] == 1


def test_a_hydra_tree_is_followed_into_the_files_that_its_defaults_name(config, capsys):
    config.write_text("defaults:\n  - data: big\n  - /trainer/kinds@trainer: fast\n  - _self_\n")
    for name, text in {
        "data/big.yaml": "batch_size: 30 # samples\n",
        "trainer/kinds/fast.yaml": "max_epochs: 1\naccumulate_grad_batches: 1\n",
    }.items():
        (config.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (config.parent / name).write_text(text)

    assert main(["apply", "plan.yaml", "conf", "--yes"]) == 0
    assert (config.parent / "data/big.yaml").read_text() == "batch_size: 15 # samples\n"
    assert "accumulate_grad_batches: 2" in (config.parent / "trainer/kinds/fast.yaml").read_text()


def test_of_two_files_that_set_a_key_the_later_one_counts(config, capsys):
    files = {
        "config.yaml": "defaults:\n  - _self_\n  - data: small\n  - trainer: two\n"
        "  - experiment: big\ntask: t\n",
        "data/small.yaml": "batch_size: 99\n",
        "data/big.yaml": "batch_size: 30\n",
        "trainer/default.yaml": "devices: 1\nmax_epochs: 3\n",
        "trainer/two.yaml": "defaults:\n  - default\n\nstrategy: ddp\ndevices: 2\n",
        "experiment/big.yaml": "# @package _global_\ndefaults:\n  - override /data: big\n"
        "  - override /hydra/sweeper: x\ntrainer:\n  accumulate_grad_batches: 3\n",
    }
    for name, text in files.items():
        (config.parent / name).parent.mkdir(exist_ok=True)
        (config.parent / name).write_text(text)

    assert main(["apply", "plan.yaml", "conf", "--yes"]) == 0
    assert "30 x 2 x 3 = 180 becomes 15 x 2 x 6 = 180" in capsys.readouterr().out
    found = {name: (config.parent / name).read_text() for name in files}
    changed = {name for name, text in files.items() if found[name] != text}
    assert changed == {"data/big.yaml", "experiment/big.yaml"}


def test_arguments_of_transformers_are_found_in_a_tree(config, capsys):
    config.write_text("defaults:\n  - train: default\nseed: 1\n")
    (config.parent / "train").mkdir()
    file = config.parent / "train/default.yaml"
    file.write_text("args:\n  output_dir: o\n  per_device_train_batch_size: 30\n")

    assert main(["apply", "plan.yaml", "conf", "--yes"]) == 0
    assert file.read_text() == (
        "args:\n  output_dir: o\n  per_device_train_batch_size: 15\n"
        "  gradient_accumulation_steps: 2\n  optim: adamw_bnb_8bit\n"
    )


def test_a_package_header_puts_a_group_elsewhere(config):
    config.write_text("defaults:\n  - experiment: one\n  - _self_\n")
    (config.parent / "experiment").mkdir()
    file = config.parent / "experiment/one.yaml"
    file.write_text("# @package _global_\ndata: {batch_size: 30}\ntrainer: {max_steps: 1}\n")

    assert main(["apply", "plan.yaml", str(config), "--yes"]) == 0
    assert "{batch_size: 15}" in file.read_text()
    assert "{max_steps: 1, accumulate_grad_batches: 2}" in file.read_text()


def test_a_plan_that_was_cut_off_is_put_back_before_the_next(config, capsys, monkeypatch):
    import os

    from memfit.configfile import transaction

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "take_place", killed)
        patch.setattr(transaction, "_put_back", lambda *args, **kwargs: None)
        assert main(["apply", "plan.yaml", str(config), "--yes"]) == 130
    assert os.path.lexists("conf/config.yaml.backup-1")

    assert main(["apply", "plan.yaml", str(config)]) == 1
    assert "was cut off" in capsys.readouterr().err
    assert main(["apply", "plan.yaml", str(config), "--yes"]) == 0
    assert "An earlier apply was cut off; what it had left is put back." in capsys.readouterr().out
    assert main(["undo"]) == 0
    assert config.read_text() == CONFIG
