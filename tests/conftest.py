"""What holds for every test."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")

# A job in the background ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes drawing slow; that says nothing about what is tested.
settings.register_profile("memfit", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("memfit")

# What only `make test-all` runs, a test per line; `list_slow_tests.py` writes it.
_SLOW = frozenset((Path(__file__).parent / "slow_tests.txt").read_text("utf-8").splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call slow what only ``make test-all`` runs."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in _SLOW:
            item.add_marker(pytest.mark.slow)
