"""Records a script in a process of its own, and reads back what was found."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memfit.errors import RecordingError
from memfit.script.question import (
    ScriptFailure,
    ScriptQuestion,
    ScriptRecording,
    Workplace,
)

_MODULE = "memfit.script.child"
_STANDARD_ERROR = 2
"""Standard output is left to the answer."""
_LOOK_EVERY_SECONDS = 0.5


class _InChildError(Exception):
    """Carry the traceback of the process that recorded, for `--debug`."""


def record_script(
    question: ScriptQuestion, tell: Callable[[str], object] | None = None
) -> ScriptRecording:
    """Run a script on real host data and a virtual device until its steps are recorded.

    Nothing is trained, and nothing stays on disk: files go to a folder that is dropped.

    Args:
        question: the script, its arguments, the device, and how much of it is recorded.
        tell: told of progress, in words, while the training data is read.

    Raises:
        RecordingError: if the script fails, makes no update, or needs what is not there.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-script-") as folder:
        place = Workplace(folder=Path(folder).resolve())
        place.written.mkdir()
        place.temporary.mkdir()
        place.question.write_bytes(pickle.dumps(question))
        exit_code = _run_child(place, tell)
        if not place.result.exists():
            raise RecordingError(
                f"the process that recorded {question.target.name} ended with exit code "
                f"{exit_code} before it was done",
                "Its output above says why; if it runs without memfit, tell us.",
            )
        found = pickle.loads(place.result.read_bytes())
    if isinstance(found, ScriptFailure):
        raise RecordingError(found.what, found.remedy) from _InChildError(found.traceback)
    assert isinstance(found, ScriptRecording), "the two things that a child writes"
    return found


def _run_child(place: Workplace, tell: Callable[[str], object] | None) -> int:
    """Run the recording process; its output goes to standard error."""
    environment = {
        **os.environ,
        "TMPDIR": str(place.temporary),
        "MPLCONFIGDIR": str(place.temporary),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, str(place.folder)],
        stdout=_STANDARD_ERROR,
        env=environment,
    )
    try:
        return process.wait() if tell is None else _wait_and_tell(process, place, tell)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _wait_and_tell(
    process: subprocess.Popen[bytes], place: Workplace, tell: Callable[[str], object]
) -> int:
    """Wait for the recording process, and pass on what it says of its progress."""
    before = ""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_EVERY_SECONDS)
        with suppress(OSError):
            now = place.progress.read_text()
            if now != before:
                tell(now)
            before = now
