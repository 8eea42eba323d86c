"""``watch_command`` passes a command's end on, whatever becomes of its own journal."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from tests.zoo.processes import run_python

from memfit.errors import DataError, FullDiskError, UsageError
from memfit.journal import folder as journal_folder
from memfit.journal.folder_lock import FolderLock
from memfit.listeners.printable_console import PrintableConsole
from memfit.watch import command
from memfit.watch.command import watch_command


class NoSigns:
    """A host without a killer."""

    def available_bytes(self) -> None:
        return None

    def found(self, sample: object) -> tuple[str, ...]:
        return ()


def watched(tmp_path: Path, code: str, folder: str = "run"):
    words = ["sh", "-c", f"cd {tmp_path}; {code}"]
    return watch_command(words, folder=tmp_path / folder, signs=NoSigns())


@pytest.mark.parametrize("exit_code", [0, 5])
def test_a_full_disk_leaves_the_exit_code_and_is_told_once(tmp_path, monkeypatch, exit_code):
    def write(path: Path, content: object) -> None:
        raise FullDiskError(str(path), "no space left", 100, 0)

    monkeypatch.setattr(journal_folder, "write_atomically", write)
    run = watched(tmp_path, f"exit {exit_code}")
    assert run.ending.exit_code == exit_code
    facts, reason = run.lost
    assert facts.startswith("run.json (No space left on the disk that holds ")
    assert reason.startswith("reason.json (No space left on the disk that holds ")


@pytest.mark.parametrize(
    "spoil",
    [
        "echo spoilt > run/.watch/1.json",
        "echo '[]' > run/.watch/1.json",
        "touch run/.watch/name.json",
        "echo '{' > run/run.json",
        "printf '\\377' > run/run.json",
        "echo '{\"reason\": 1}' > run/reason.json",
        "rm -r run",
        "rm -r run; touch run",
        "printf '\\377' > run/steps.jsonl",
    ],
)
def test_a_spoilt_journal_leaves_the_exit_code(tmp_path, spoil):
    assert watched(tmp_path, f"{spoil}; exit 3").ending.exit_code == 3


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_started(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be used as a folder"):
        watched(tmp_path, "touch started", folder="file")

    def mkdir(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.Path, "mkdir", mkdir)
    with pytest.raises(FullDiskError):
        watch_command(["touch", "started"])
    assert not (tmp_path / "started").exists()


def test_two_runs_in_one_folder_at_the_same_time_are_refused(tmp_path):
    assert watched(tmp_path, "exit 0").ending.exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    lock = FolderLock(tmp_path / "run")
    words = ["touch", str(tmp_path / "started")]
    with pytest.raises(UsageError, match="is in use: process "):
        watch_command(words, folder=tmp_path / "run", overwrite=True, signs=NoSigns())
    lock.release(keeps_file=False)
    assert not (tmp_path / "started").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_overwrite_replaces_no_file_of_another(tmp_path):
    (tmp_path / "run").mkdir()
    mine = tmp_path / "run" / "run.json"
    mine.write_text('{"name": "mine"}')
    with pytest.raises(UsageError, match=r"run\.json is in the way, and no run of memfit"):
        watch_command(["true"], folder=tmp_path / "run", overwrite=True, signs=NoSigns())
    assert mine.read_text() == '{"name": "mine"}'


def test_the_memory_of_a_command_that_ends_soon_is_seen(tmp_path):
    code = "import mmap, time; m = mmap.mmap(-1, 2**26); m.write(b'x' * 2**26); time.sleep(0.06)"
    run = watch_command([sys.executable, "-S", "-c", code], folder=tmp_path, signs=NoSigns())
    assert run.ending.host_peak_bytes > 2**26


@pytest.mark.parametrize("columns", ["0", "3", "-5", "wide"])
def test_a_width_that_makes_no_sense_is_that_of_a_page(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for is_error in (False, True):
        assert PrintableConsole(stderr=is_error).width >= 40


@pytest.mark.slow
def test_a_stream_that_takes_nothing_leaves_the_exit_code(tmp_path):
    words = ["-m", "memfit", "run", "--folder", "run", "--json", "--", sys.executable, "-c", ""]
    with Path("/dev/full").open("w") as full:
        done = run_python(*words, cwd=tmp_path, capture_output=False, stdout=full, stderr=full)
    assert done.returncode == 0
