"""Carries out a story of any kind; what a kind does not need is not imported for it."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from chaos_runs.outcomes import Outcome
from chaos_runs.processes import adopt_orphans, room
from chaos_runs.stories import COMMAND, CONFIG, Story


def prepared(kind: str | None) -> None:
    """Get ready for stories of a kind; None for all of them."""
    if kind == CONFIG:
        adopt_orphans()
        return
    from chaos_runs.warming import warm_up  # noqa: PLC0415 - with torch

    warm_up()


def carried_out(story: Story, *, keeps: Path | None = None) -> Outcome:
    """Carry out a story in a folder of its own.

    Args:
        story: what is done.
        keeps: a folder for its files; None drops them.
    """
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="memfit-chaos-", dir=room()))
    try:
        outcome = _of_its_kind(story, root)
    finally:
        if keeps is not None:
            shutil.copytree(root, keeps, dirs_exist_ok=True)
        shutil.rmtree(root, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    return outcome


def _of_its_kind(story: Story, root: Path) -> Outcome:
    if story.kind == CONFIG:
        from chaos_runs.configs import edited  # noqa: PLC0415 - without torch

        return edited(story, root)
    if story.kind == COMMAND:
        from chaos_runs.commands import called  # noqa: PLC0415 - as above

        return called(story, root)
    from chaos_runs.one_run import trained  # noqa: PLC0415 - with torch

    return trained(story, root)
