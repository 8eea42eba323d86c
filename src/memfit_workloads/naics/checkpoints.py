"""Checkpoints of a run: the stage and step that it has come to, and all that goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback

from memfit.errors import DataError, UsageError
from memfit.files import replace_atomically
from memfit_workloads.checkpoint_files import (
    random_state,
    read_checkpoint,
    refuse_other_run,
    restore_random_state,
    save_checkpoint,
)
from memfit_workloads.interruption import InterruptWatch
from memfit_workloads.memory_settings import plain_values

from .settings import NaicsSettings

if TYPE_CHECKING:
    from memfit.integrations.lightning import MemfitCallback

    from .module import NaicsContrastive

LAST = "last.ckpt"
_OWN, _RANDOM, _WEIGHTS = "naics", "random_state", "state_dict"
_NO_MATTER = (
    *("experiment_name", "data_loader.num_workers"),
    *("training.learned_fraction", "training.trainer.every_n_train_steps"),
)
"""Settings that change nothing of what is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far a run has come."""

    run: Mapping[str, Any]
    """What identifies it."""
    stage: int = 0
    """The number of the stage under way, or to begin."""
    epoch: int | None = None
    """Of the stage; None if the stage has not begun."""
    num_steps: int = 0
    """Batches of the epoch that are done."""
    peak_bytes: int | None = None
    """The highest peak of the stage so far."""
    stages: Mapping[str, Any] = field(default_factory=dict)
    """What the stages before came to."""
    baselines: Mapping[str, Any] = field(default_factory=dict)


def identity_of(settings: NaicsSettings) -> dict[str, Any]:
    """Return what two runs have in common that go on from each other."""
    found: dict[str, Any] = {}

    def put(place: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, below in value.items():
                put(f"{place}.{name}" if place else str(name), below)
        elif place not in _NO_MATTER:
            found[place] = plain_values(value)

    put("", settings.config)
    return found | {"stages": [plain_values(stage) for stage in settings.stages]}


def learned_state(module: NaicsContrastive) -> dict[str, torch.Tensor]:
    """Return what has learned, and the centre of the texts; the encoder is a package's."""
    learned = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {
        name: value
        for name, value in module.state_dict().items()
        if name in learned or name.endswith("centre")
    }


class StageCheckpoints(Callback):
    """Save a stage every so many updates, and at Ctrl-C, after the update under way.

    A checkpoint is Lightning's own, of what has learned alone, with the random states and how far
    the run has come beside it.

    Args:
        path: of the checkpoint; it holds the last one, whole.
        every: so many updates.
        reached: what is known of the run as the stage begins.
        in_force: that measures peaks.
        watch: for Ctrl-C.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        reached: Reached,
        in_force: MemfitCallback,
        watch: InterruptWatch,
    ) -> None:
        self._path, self._every, self._reached = path, every, reached
        self._in_force, self._watch = in_force, watch
        self._step, self._is_due = 0, False
        self._random: dict[str, Any] | None = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the random states, which planning and trying the largest batch come before."""
        del trainer, pl_module
        self._random = checkpoint[_RANDOM]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the random states back."""
        del pl_module
        self._step = trainer.global_step
        if self._random is not None:
            restore_random_state(self._random)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where an update has ended, if it is time."""
        del pl_module, outputs, batch
        if trainer.global_step == self._step:
            return  # inside a window of accumulated batches, whose gradients are in no checkpoint
        self._step = trainer.global_step
        if self._watch.is_requested:
            trainer.should_stop = True
        if not self._watch.is_requested and self._step % self._every:
            return
        if trainer.is_last_batch:
            self._is_due = True  # Lightning continues at an epoch's end from what its end has saved
        else:
            self._save(trainer, trainer.current_epoch, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, if the last update of the epoch was one to save after."""
        del pl_module
        if self._is_due:
            self._is_due = False
            self._save(trainer, trainer.current_epoch + 1, 0)

    def _save(self, trainer: Any, epoch: int, num_steps: int) -> None:
        earlier, now = self._reached.peak_bytes, self._in_force.measured_peak_bytes
        self._reached = replace(
            self._reached,
            epoch=epoch,
            num_steps=num_steps,
            peak_bytes=max(filter(None, (earlier, now)), default=None),
        )
        replace_atomically(self._path, trainer.save_checkpoint)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave out the frozen encoder; add what Lightning does not keep."""
        del trainer
        checkpoint[_WEIGHTS] = learned_state(pl_module)
        checkpoint[_RANDOM] = random_state()
        checkpoint[_OWN] = asdict(self._reached)


def save_between(path: Path, module: NaicsContrastive, reached: Reached) -> None:
    """Save a run between two stages."""
    save_checkpoint(path, {_WEIGHTS: learned_state(module), _OWN: asdict(reached)})


def read_reached(path: Path, settings: NaicsSettings, module: NaicsContrastive) -> Reached:
    """Read how far a run has come, and put its weights into the module.

    Raises:
        UsageError: if the folder holds no run to go on with, or another one.
        DataError: if the checkpoint is no whole one.
    """
    if not path.is_file():
        msg = (
            f"{path.parent.parent} holds no checkpoint to continue from ({LAST} is missing). Leave "
            "out --resume to begin anew, or name the run's folder with --output-dir."
        )
        raise UsageError(msg)
    content = read_checkpoint(path, "naics", (_OWN, _WEIGHTS))
    reached = Reached(**content[_OWN])
    refuse_other_run(path, reached.run, identity_of(settings), flag="--resume")
    wanted = learned_state(module)
    if wanted.keys() != content[_WEIGHTS].keys():
        reason = "it lacks weights that learn here, or has others. Begin anew without --resume."
        raise DataError(str(path), reason)
    module.load_state_dict(content[_WEIGHTS], strict=False)
    return reached
