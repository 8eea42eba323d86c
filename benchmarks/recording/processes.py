"""Children as operating-system processes: started, told to go, read, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
GO, READY, RESULT = "go", "ready", "result.json"
"""Files in a child's folder: it may have the card, it waits for it, and its outcome."""
_LOG = "log.txt"
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Whatever changes the figures and is not part of an entry.
_CLEARED = (*_ALLOCATOR_NAMES, "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
_LOG_CHARACTERS = 2000
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child is to do; without a row it describes the card."""

    name: str
    row: Mapping[str, Any] | None
    device: str
    allocator: str | None = None
    snapshot: Path | None = None


class ChildProcess:
    """A child that is a process with a folder of its own."""

    def __init__(self, job: Job, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        snapshot = str(job.snapshot) if job.snapshot else None
        description = {"row": job.row, "device": job.device, "snapshot": snapshot}
        (folder / "job.json").write_text(json.dumps(description), encoding="utf-8")
        command = [sys.executable, "-m", "recording.child", str(folder / "job.json"), str(folder)]
        with (folder / _LOG).open("wb") as log:
            # A session of its own: Ctrl-C reaches the recording alone, which ends its children.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ, job.allocator),
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Return whether it waits for its turn on the card."""
        return (self._folder / READY).exists()

    def go(self) -> None:
        """Give it the card."""
        (self._folder / GO).touch()

    def has_ended(self) -> bool:
        """Return whether it is over."""
        return self._process.poll() is not None

    def result(self) -> dict[str, Any] | None:
        """Read its outcome; None if there is none."""
        try:
            result: dict[str, Any] = json.loads((self._folder / RESULT).read_text("utf-8"))
        except FileNotFoundError:
            return None
        return result

    def complaint(self) -> str:
        """Read the end of what it wrote, and how it ended."""
        text = (self._folder / _LOG).read_text("utf-8", errors="replace").strip()
        return f"exit code {self._process.poll()}: {text[-_LOG_CHARACTERS:]}"

    def end(self) -> None:
        """End it: first politely, then not."""
        if self.has_ended():
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def child_environment(parent: Mapping[str, str], allocator: str | None) -> dict[str, str]:
    """Return a child's environment: nothing that changes memory but the allocator's setting."""
    found = {name: value for name, value in parent.items() if name not in _CLEARED}
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    found["TOKENIZERS_PARALLELISM"] = "false"
    if allocator is not None:
        found["PYTORCH_ALLOC_CONF"] = allocator
    return found
