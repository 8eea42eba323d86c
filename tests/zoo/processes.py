"""Python in processes of its own, with memfit from these sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import memfit

SOURCE_FOLDER = Path(memfit.__path__[0]).parent
TIMEOUT_SECONDS = 300
"""For a busy machine."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process in which these sources are memfit."""
    own = {"PYTHONPATH": str(SOURCE_FOLDER), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def run_python(
    *words: str, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end and keep what it writes; options are those of ``subprocess.run``."""
    known = {"env": environment(), "capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    return subprocess.run([sys.executable, *words], check=check, **{**known, **options})


def imports_after(code: str, *modules: str) -> set[str]:
    """Return which of some modules a fresh Python has imported once it has run the code."""
    report = f"import sys; print('IMPORTED', *[m for m in {modules} if m in sys.modules])"
    done = run_python("-c", f"{code}\n{report}")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])
