"""Runs what is recorded: a script, a module, or what a name in a script stands for."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from memfit.errors import JobNameError, StepBuilderError
from memfit.job import StepBuilder, is_trainer
from memfit.script.question import ScriptTarget

_MOST_STEPS = 1000


def run_target(target: ScriptTarget, step_ended: Callable[[], None]) -> None:
    """Run a target as Python would, with its own arguments and its own folder to import from.

    Args:
        target: what is run.
        step_ended: called after each step of a function that does one step.

    Raises:
        JobNameError: if the script has nothing of the name.
        StepBuilderError: if what has the name cannot be run.
    """
    folder = Path.cwd() if target.is_module else Path(target.name).resolve().parent
    argv, path = [target.name, *target.arguments], [str(folder), *sys.path]
    with patch.object(sys, "argv", argv), patch.object(sys, "path", path):
        _run(target, step_ended)


def _run(target: ScriptTarget, step_ended: Callable[[], None]) -> None:
    if target.is_module:
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        return
    if not target.attribute:
        runpy.run_path(target.name, run_name="__main__")
        return
    names = runpy.run_path(target.name, run_name=Path(target.name).stem)
    if target.attribute not in names:
        raise JobNameError(target.name, target.attribute, [])
    _run_found(target, names[target.attribute], step_ended)


def _run_found(target: ScriptTarget, found: Any, step_ended: Callable[[], None]) -> None:
    """Run a trainer, or what a function without arguments builds: a trainer or a step."""
    if not is_trainer(found):
        if not callable(found):
            raise StepBuilderError(target.title, f"it is a {type(found).__name__}")
        found = found()
    if is_trainer(found):
        if isinstance(found, tuple):
            found[0].fit(*found[1:])
        else:
            found.train()
        return
    step = StepBuilder(name=target.title, function=lambda: found)()
    for _ in range(_MOST_STEPS):  # what records ends it
        step()
        step_ended()
