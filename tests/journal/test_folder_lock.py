"""One run at a time in a folder, whatever becomes of the process that runs there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.zoo.processes import environment

from memfit.errors import UsageError
from memfit.journal.folder_lock import LOCK_NAME, FolderLock, hold_folder

HOLD = """
import sys, time
from pathlib import Path
from memfit.journal.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    held_by = f"is in use: process {os.getpid()} on "
    with pytest.raises(UsageError, match=re.escape(held_by)) as caught:
        FolderLock(tmp_path)
    assert caught.value.exit_code == 2
    lock.release(keeps_file=False)
    assert not [*tmp_path.iterdir()]
    FolderLock(tmp_path).release(keeps_file=True)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    FolderLock(tmp_path).release(keeps_file=True)


@pytest.mark.slow
def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"process {holder.pid} on "):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
    FolderLock(tmp_path).release(keeps_file=False)


def test_a_process_that_runs_twice_in_a_folder_has_it_already(tmp_path: Path) -> None:
    hold_folder(tmp_path)
    hold_folder(tmp_path)
    with pytest.raises(UsageError, match="is in use"):
        FolderLock(tmp_path)
