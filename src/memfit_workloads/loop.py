"""The training loop of all workloads: steps, and an exact way to stop and continue."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NoReturn

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memfit.errors import MemfitError

from .checkpoint_files import restore_random_state
from .interruption import InterruptWatch

if TYPE_CHECKING:
    from .system import System


def fit(system: System) -> None:
    """Train a system to its end.

    Raises:
        MemfitError: if the loss is no number.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint of this very step is written.
    """
    ranks = system.ranks
    device = next(system.run.model.parameters()).device
    with InterruptWatch(is_patient=ranks.group is not None) as watch, _progress_bar(system) as bar:
        task = bar.add_task("")
        while not system.is_over():
            if ranks.any(watch.is_requested, device):
                _interrupt(system)
            _step(system)
            system.after_step()
            description, completed, total = system.progress()
            bar.update(task, description=description, completed=completed, total=total)


def resume(system: System, checkpoint: dict[str, Any]) -> None:
    """Take up everything that a checkpoint of this training run holds."""
    system.run.load_state_dict(
        {
            "model": system.model_state(checkpoint),
            "optimizer": checkpoint["optimizer_state_dict"],
            **checkpoint["run_state"],
        }
    )
    system.resumed(checkpoint)
    restore_random_state(checkpoint["random_state"])


def _step(system: System) -> None:
    started = time.perf_counter()
    loss = float(system.run.step(system.next_batch()).loss)
    if not math.isfinite(loss):
        msg = (
            f"The loss is {loss} in {system.place()}. No final model is written; the checkpoints "
            f"before it stay in {system.folder.checkpoints}. {system.remedy}"
        )
        raise MemfitError(msg)
    system.step_done(loss, time.perf_counter() - started)


def _interrupt(system: System) -> NoReturn:
    """Save this very step, say how to go on, and stop."""
    path = system.save_interrupted()
    if system.ranks.is_first:
        command = system.settings.command.replace(" --overwrite", "")
        system.console.print(
            f"Interrupted {system.reached()}. Saved as {path}. Continue exactly there with:\n"
            f"{command} {system.folder.resume_flag}",
            soft_wrap=True,
        )
    system.ranks.wait()
    raise KeyboardInterrupt


def _progress_bar(system: System) -> Progress:
    """Show steps where someone is watching."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=system.console,
        transient=True,
        disable=not (system.console.is_terminal and system.ranks.is_first),
    )
