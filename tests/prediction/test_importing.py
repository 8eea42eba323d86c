"""A user's file is imported as on a machine with the card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ASKS_COMPILE_AT_ITS_TOP = """
import torch


@torch.compiler.disable
def attend(x):
    return x


job = torch.cuda.is_available()
"""
LOADS = """
from memfit.devices.catalogue import load_device
from memfit.job import _import_file
from memfit.prediction.importing import imported_on
from pathlib import Path

print(imported_on(load_device("t4"), lambda path: _import_file(Path(path), "job").job, "job.py"))
"""


def test_a_file_that_is_the_first_to_use_torch_compile_is_imported(tmp_path):
    """torch.compile sorts torch's functions when it is first used, as transformers' files do."""
    (tmp_path / "job.py").write_text(ASKS_COMPILE_AT_ITS_TOP)
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr
