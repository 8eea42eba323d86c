"""Commands as a user starts them: modules lie compiled beside their sources.

An installer that was told to write no bytecode leaves none, and each command compiles torch anew:
three to eight seconds that no second command of a user takes.
"""

from __future__ import annotations

import compileall
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_SETTING = "PYTHONDONTWRITEBYTECODE"


def compile_installed(checkout: Path) -> None:
    """Compile what is installed and what a checkout holds; what is compiled is left alone."""
    for folder in (sysconfig.get_path("purelib"), str(checkout / "src")):
        compileall.compile_dir(folder, quiet=2, workers=0)


def user_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this environment with changes, in which modules are read as they were compiled."""
    found = {name: value for name, value in os.environ.items() if name != _SETTING}
    return found | dict(changes)
