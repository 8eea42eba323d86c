"""What holds for every test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")
