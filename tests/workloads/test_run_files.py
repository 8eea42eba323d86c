"""A run folder is begun anew without a loss of what is not memfit's."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.journal.folder_lock import LOCK_NAME, FolderLock
from memfit_workloads.run_files import RunFiles


def run_files(root: Path) -> RunFiles:
    return RunFiles(root=root, checkpoints=root / "checkpoints", own=("a.pt",), final=("a.pt",))


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    root = tmp_path / "run"
    files = run_files(root)
    files.begin(overwrite=False)
    for name in ("config.json", "plan.yaml", "a.pt"):
        files.write(name, "of the run")
    for name in ("checkpoint_epoch_3.pt", "checkpoint_interrupted.pt", "epoch=1-step=4.ckpt"):
        (files.checkpoints / name).touch()
    mine = [root / "thesis.txt", root / "data" / "config.json", files.checkpoints / "mine.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    files.begin(overwrite=True)
    left = {path for path in root.rglob("*") if path.is_file()}
    assert left == {*mine, root / LOCK_NAME}


@pytest.mark.parametrize("name", ["config.json", "plan.yaml", "run.json"])
def test_what_no_run_has_written_is_not_replaced(tmp_path, name):
    mine = tmp_path / name
    mine.write_text("{}")
    (tmp_path / "model.py").touch()
    with pytest.raises(UsageError, match=f"{name} is in the way, and no run of memfit"):
        run_files(tmp_path).begin(overwrite=True)
    assert mine.read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "model.py"])


@pytest.mark.parametrize("name", ["checkpoint_of_mine.pt", "best.ckpt"])
def test_a_checkpoint_of_another_is_not_replaced(tmp_path, name):
    files = run_files(tmp_path)
    files.begin(overwrite=False)
    mine = files.checkpoints / name
    mine.touch()
    with pytest.raises(UsageError, match=f"{name} is in the way"):
        files.begin(overwrite=True)
    assert mine.exists()


def test_a_folder_in_which_a_run_goes_on_is_refused(tmp_path):
    files = run_files(tmp_path / "run")
    files.root.mkdir()
    lock = FolderLock(files.root)
    (files.root / "plan.yaml").write_text("of the run")
    for begin in (lambda: files.begin(overwrite=True), files.resume):
        with pytest.raises(UsageError, match="is in use: process "):
            begin()
    assert (files.root / "plan.yaml").exists()
    lock.release(keeps_file=True)
    files.begin(overwrite=True)
