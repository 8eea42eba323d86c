"""What holds for every test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")

# A busy machine makes drawing slow; that says nothing about what is tested.
settings.register_profile("memfit", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("memfit")
