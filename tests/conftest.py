"""What holds for every test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")

# A busy machine makes drawing slow; that says nothing about what is tested.
settings.register_profile("memfit", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("memfit")

# What only `make test-all` runs, a file per line: what takes minutes, or has to be gone through yet.
_ONLY_IN_TEST_ALL = frozenset(
    (Path(__file__).parent / "only_in_test_all.txt").read_text("utf-8").split()
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call slow whatever is in a file that only ``make test-all`` runs."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.relative_to(folder).as_posix() in _ONLY_IN_TEST_ALL:
            item.add_marker(pytest.mark.slow)
