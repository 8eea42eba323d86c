"""Carries out a story of any kind."""

from __future__ import annotations

from pathlib import Path

from chaos_runs import commands, configs, one_run
from chaos_runs.outcomes import Outcome
from chaos_runs.stories import COMMAND, CONFIG, Story


def carried_out(story: Story, *, keeps: Path | None = None) -> Outcome:
    """Carry out a story.

    Args:
        story: what is done.
        keeps: a folder for the files of a training; None drops them.
    """
    if story.kind == CONFIG:
        return configs.edited(story)
    if story.kind == COMMAND:
        return commands.called(story)
    return one_run.trained(story, keeps=keeps)
