"""What a script writes is kept out of the real files, and seen by the script all the same."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from memfit.script.compiled_files import compiled_files
from memfit.script.overlay import Overlay


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Give a folder of the user's with one file, which is the working one."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("a")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def overlay(place, tmp_path):
    """Lay an overlay over all files until the test ends; then nothing may have changed."""
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    found = Overlay(tmp_path / "written")
    (tmp_path / "written").mkdir()
    with ExitStack() as stack:
        for replacement in (*compiled_files(found), *found.replacements()):
            stack.enter_context(replacement)
        yield found
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before


def test_a_file_that_is_written_can_be_read_again(overlay):
    Path("new.txt").write_text("new")
    with open("old.txt", "a") as file:  # noqa: PTH123 - as scripts do
        file.write("er")
    assert Path("new.txt").read_text() == "new"
    assert Path("old.txt").read_text() == "older"
    assert sorted(os.listdir(".")) == ["data", "new.txt", "old.txt"]  # noqa: PTH208
    assert sorted(path.name for path in Path().iterdir()) == ["data", "new.txt", "old.txt"]
    assert [Path(each.path).name for each in overlay.diverted()] == ["new.txt", "old.txt"]


def test_folders_are_made_walked_and_removed(overlay):
    os.makedirs("out/deep/er", exist_ok=True)  # noqa: PTH103
    Path("out/deep/er/x.bin").write_bytes(b"x" * 10)
    assert Path("out/deep").is_dir()
    assert [path.name for path in Path("out").rglob("*.bin")] == ["x.bin"]
    shutil.rmtree("out")
    assert not Path("out").exists()
    with pytest.raises(FileExistsError):
        Path("data").mkdir()


def test_a_new_folder_can_be_gone_into(overlay, place):
    Path("run").mkdir()
    os.chdir("run")
    try:
        Path("log.txt").write_text("log")
        assert Path("log.txt").read_text() == "log"
    finally:
        os.chdir(place)
    assert [each.path for each in overlay.diverted()] == [str(place / "run" / "log.txt")]


def test_removed_and_moved_files_are_gone_for_the_script_alone(overlay):
    Path("data/a.txt").unlink()
    assert not Path("data/a.txt").exists()
    assert os.listdir("data") == []  # noqa: PTH208
    os.replace("old.txt", "data/b.txt")
    assert not Path("old.txt").exists()
    assert Path("data/b.txt").read_text() == "old"
    shutil.copytree("data", "copy")
    assert [path.name for path in Path("copy").iterdir()] == ["b.txt"]
    with pytest.raises(FileNotFoundError):
        Path("old.txt").unlink()


def test_arrays_are_mapped_and_exclusive_files_are_refused(overlay):
    mapped = np.memmap("array.bin", dtype=np.int32, mode="w+", shape=(4,))
    mapped[:] = 7
    mapped.flush()
    assert np.fromfile("array.bin", dtype=np.int32).tolist() == [7, 7, 7, 7]
    np.save("array.npy", np.arange(3))
    assert np.load("array.npy", mmap_mode="r").tolist() == [0, 1, 2]
    with pytest.raises(FileExistsError):
        open("old.txt", "x")  # noqa: PTH123, SIM115 - it must not open
    with pytest.raises(FileNotFoundError):
        open("nowhere/file.txt", "w")  # noqa: PTH123, SIM115 - it must not open


def test_a_compiled_library_writes_and_reads_through_the_overlay(overlay):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.save("tokenizer.json")
    read = tokenizers.Tokenizer.from_file("tokenizer.json")
    assert read.get_vocab_size() == 1
    assert [Path(each.path).name for each in overlay.diverted()] == ["tokenizer.json"]
