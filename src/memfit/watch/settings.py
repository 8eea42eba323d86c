"""What the outer half tells the inner one: variables of the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import memfit
from memfit.journal.folder import WATCH_FOLDER_VARIABLE

DISABLE = "MEMFIT_DISABLE"
_FOLDER, _BUDGET, _LEAKS, _SOURCE, _FIT = (
    WATCH_FOLDER_VARIABLE,
    "MEMFIT_WATCH_BUDGET_BYTES",
    "MEMFIT_WATCH_LEAKS",
    "MEMFIT_WATCH_SOURCE",
    "MEMFIT_WATCH_FIT",
)
_ATTACH_FOLDER = Path(__file__).parent / "attach"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """How a command is watched."""

    folder: Path
    """Absolute: scripts change their working directory."""
    budget_bytes: int | None = None
    """Enforced in each process by itself."""
    finds_leaks: bool = True
    fit: Mapping[str, Any] | None = None
    """What to ask of a framework's trainer that is found inside; None leaves trainers alone."""


def watched_environment(settings: WatchSettings, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python processes attach themselves."""
    paths = [str(_ATTACH_FOLDER), base.get("PYTHONPATH", "")]
    watched = {
        **base,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        _FOLDER: str(settings.folder),
        _LEAKS: "1" if settings.finds_leaks else "0",
        _SOURCE: os.pathsep.join((memfit.__path__[0], psutil.__path__[0])),
    }
    watched.pop(_BUDGET, None)
    if settings.budget_bytes is not None:
        watched[_BUDGET] = str(settings.budget_bytes)
    watched.pop(_FIT, None)
    if settings.fit is not None:
        watched[_FIT] = json.dumps(dict(settings.fit))
    return watched


def settings_from(environment: Mapping[str, str]) -> WatchSettings | None:
    """Read the settings back; None in a process that is not watched."""
    if _FOLDER not in environment or environment.get(DISABLE) == "1":
        return None
    budget = environment.get(_BUDGET)
    return WatchSettings(
        folder=Path(environment[_FOLDER]),
        budget_bytes=None if budget is None else int(budget),
        finds_leaks=environment.get(_LEAKS) != "0",
        fit=json.loads(environment[_FIT]) if _FIT in environment else None,
    )
