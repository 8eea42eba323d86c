"""Carries out a story of any kind; what a kind does not need is not imported for it."""

from __future__ import annotations

from pathlib import Path

from chaos_runs.outcomes import Outcome
from chaos_runs.processes import adopt_orphans
from chaos_runs.stories import COMMAND, CONFIG, Story


def prepared(kind: str | None) -> None:
    """Get ready for stories of a kind; None for all of them."""
    if kind == CONFIG:
        adopt_orphans()
        return
    from chaos_runs.warming import warm_up  # noqa: PLC0415 - with torch

    warm_up()


def carried_out(story: Story, *, keeps: Path | None = None) -> Outcome:
    """Carry out a story.

    Args:
        story: what is done.
        keeps: a folder for the files of a training; None drops them.
    """
    if story.kind == CONFIG:
        from chaos_runs.configs import edited  # noqa: PLC0415 - without torch

        return edited(story)
    if story.kind == COMMAND:
        from chaos_runs.commands import called  # noqa: PLC0415 - as above

        return called(story)
    from chaos_runs.one_run import trained  # noqa: PLC0415 - with torch

    return trained(story, keeps=keeps)
