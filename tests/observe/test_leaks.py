"""The tests of the leak finder, in a process of their own.

The finder looks at everything that Python holds. After a thousand other tests that is a hundred
times what it is in a fresh process, and takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = [Path(__file__).with_name(f"{name}.py") for name in ("leaks_alone", "leaks_heldout_alone")]


@pytest.mark.slow
def test_the_leak_finder_by_itself() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*words, *map(str, ALONE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ALONE[0].parents[2],
        env=environment,
    )
    assert done.returncode == 0, done.stdout
