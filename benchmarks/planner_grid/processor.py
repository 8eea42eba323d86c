"""Plans with the catalogue's guesses for any processor, or with what was measured of this one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.cli.main import main as memfit

_FOLDER = "MEMFIT_CONFIG_DIR"


@contextmanager
def calibrated_processor() -> Iterator[None]:
    """Measure this processor, and have plans go by that."""
    with tempfile.TemporaryDirectory() as folder, _configured(folder):
        memfit(["calibrate", "--device", "cpu"])
        yield


@contextmanager
def guessed_processor() -> Iterator[None]:
    """Have plans go by the catalogue."""
    with tempfile.TemporaryDirectory() as folder, _configured(folder):
        yield


@contextmanager
def _configured(folder: str) -> Iterator[None]:
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
