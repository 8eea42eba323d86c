"""Systems that are trained epoch by epoch over rows in a new random order each time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from memfit.errors import DataError

from .checkpoint_files import (
    INTERRUPTED,
    random_state,
    read_checkpoint,
    refuse_other_run,
    save_checkpoint,
)
from .system import System

if TYPE_CHECKING:
    from rich.console import Console

    from .memory_settings import EpochSettings

BEST, FINAL, HISTORY = "best_model.pt", "final_model.pt", "training_history.json"
_NEEDED = ("epoch", "model_state_dict", "optimizer_state_dict", "model_config", "metrics")


class FoundCheckpoint(NamedTuple):
    """A checkpoint that could be read, and the files that could not be."""

    path: Path
    content: dict[str, Any]
    unreadable: list[str]


@dataclass(slots=True)
class EpochState:
    """How far training has come; together with weights and random states it is all there is."""

    epoch: int = 0
    """Whole epochs done."""
    steps_done: int = 0
    """Steps done of the epoch under way."""
    num_steps: int = 0
    """Steps done of all epochs."""
    rows_done: int = 0
    """Rows trained on in the epoch under way."""
    loss_sum: float = 0.0
    """Over the rows of the epoch under way."""
    epoch_seconds: float = 0.0
    best_epoch: int | None = None
    best_score: float | None = None
    validations_since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class EpochSystem(System):
    """A system whose data are rows, each trained on once in every epoch."""

    score: ClassVar[str]
    """The validation metric that chooses the best weights; the higher, the better."""
    settings: EpochSettings
    state: EpochState

    def __init__(self, settings: EpochSettings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.state = EpochState()
        self._order = torch.Generator().manual_seed(settings.random_seed)
        self._order_state: Tensor | None = None
        self._batches: Sequence[Tensor] = ()

    # What a workload gives.

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Return the number of rows to train on."""

    @abstractmethod
    def batch(self, rows: Tensor) -> Any:
        """Return a batch of these rows, on the run's device."""

    def cut(self, order: Tensor) -> Sequence[Tensor]:
        """Cut the rows of an epoch into batches."""
        return order.split(self.settings.batch_size)

    @abstractmethod
    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""

    @abstractmethod
    def validate(self) -> tuple[float, dict[str, Any]]:
        """Return the score of the weights as they are, and all validation metrics."""

    @abstractmethod
    def model_config(self) -> dict[str, Any]:
        """Return what builds the model again."""

    @abstractmethod
    def data_config(self) -> dict[str, Any]:
        """Return what a continuation has to find again of the data; a checkpoint holds it."""

    @property
    def epoch_steps(self) -> int:
        """Return the number of steps of an epoch."""
        return -(-self.num_rows // self.settings.batch_size)

    @property
    def most_steps(self) -> int:
        """Return how many steps are trained, unless validation stops them."""
        most = self.epoch_steps * self.settings.num_epochs
        return min(most, self.settings.max_steps or most)

    def outlook(self) -> dict[str, Any]:
        """Return the steps of an epoch, and the seconds that they are predicted to take."""
        step_seconds = self.planned_memory.planned.step_seconds
        return {"epoch_steps": self.epoch_steps, "epoch_seconds": self.epoch_steps * step_seconds}

    # The loop.

    def begin(self) -> None:
        """Fix what is drawn from here on."""
        torch.manual_seed(self.settings.random_seed)

    def is_over(self) -> bool:
        """Return whether all epochs or steps are done, or validation has stopped improving."""
        patience = self.settings.early_stopping_patience
        if patience is not None and self.state.validations_since_best >= patience:
            return True
        return self._is_last_step() or self.state.epoch >= self.settings.num_epochs

    def _is_last_step(self) -> bool:
        """Return whether as many steps are done as there may be."""
        return self.state.num_steps >= (self.settings.max_steps or math.inf)

    def next_batch(self) -> Any:
        """Return the next batch of the epoch, which begins with the first."""
        if not self._batches:
            for group in self.run.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.state.epoch)
            self._order_state = self._order.get_state()
            self._batches = self.cut(torch.randperm(self.num_rows, generator=self._order))
        return self.batch(self._batches[self.state.steps_done])

    def step_done(self, loss: float, seconds: float) -> None:
        """Account for a step."""
        num_rows = len(self._batches[self.state.steps_done])
        self.state.loss_sum += loss * num_rows
        self.state.rows_done += num_rows
        self.state.steps_done += 1
        self.state.num_steps += 1
        self.state.epoch_seconds += seconds

    def after_step(self) -> None:
        """Validate after an epoch, note what it gave, and write what is due."""
        state, settings = self.state, self.settings
        is_last = self._is_last_step()
        if state.steps_done < len(self._batches) and not is_last:
            if settings.checkpoint_steps and state.num_steps % settings.checkpoint_steps == 0:
                self.save_interrupted()
            return
        num_in_epoch = len(self._batches)
        self._batches, self._order_state = (), None
        state.epoch += 1
        valid = score = None
        is_last = is_last or state.epoch == settings.num_epochs
        if is_last or state.epoch % settings.eval_every == 0:
            score, valid = self.validate()
        self._note_epoch(score, valid, num_in_epoch)
        is_best = score is not None and self._note_score(score)
        self._write_history()
        if is_best:
            save_checkpoint(self.folder.root / BEST, self.checkpoint())
        if self.is_over() or state.epoch % settings.checkpoint_frequency == 0:
            path = self.folder.checkpoints / f"checkpoint_epoch_{state.epoch}.pt"
            save_checkpoint(path, self.checkpoint())

    def _note_epoch(
        self, score: float | None, valid: dict[str, Any] | None, num_in_epoch: int
    ) -> None:
        """Turn the sums of the epoch into a line of history, and begin them anew."""
        state = self.state
        prediction = self.run.plan.prediction
        line = {
            "epoch": state.epoch,
            "num_steps": state.steps_done,
            "loss": state.loss_sum / state.rows_done,
            "learning_rate": self.run.optimizer.param_groups[0]["lr"],
            f"valid_{self.score}": score,
            "valid": valid,
            "seconds": state.epoch_seconds,
            "predicted_peak_bytes": prediction.peak_allocated_bytes if prediction else None,
            "measured_peak_bytes": self.run.measured_peak_bytes,
        }
        state.history.append(line)
        state.steps_done, state.rows_done = 0, 0
        state.loss_sum, state.epoch_seconds = 0.0, 0.0
        if score is not None:
            is_whole = line["num_steps"] == num_in_epoch
            part = "" if is_whole else f", {line['num_steps']} of {num_in_epoch} steps"
            self.console.print(
                f"epoch {line['epoch']}{part}: loss {line['loss']:.5f}, "
                f"valid {self.score.upper()} {score:.4f}, {line['seconds']:.2f} s"
            )

    def _note_score(self, score: float) -> bool:
        """Return whether this is the best validation so far."""
        state = self.state
        if state.best_score is not None and score <= state.best_score:
            state.validations_since_best += 1
            return False
        state.best_score, state.best_epoch, state.validations_since_best = score, state.epoch, 0
        return True

    def _write_history(self) -> None:
        """Write what every epoch gave, as one JSON value and as one line per epoch."""
        self.folder.write_json(HISTORY, self.state.history)
        self.folder.write_lines("metrics.jsonl", self.state.history)

    def progress(self) -> tuple[str, int, int]:
        """Return the epoch and its steps."""
        epoch = min(self.state.epoch + 1, self.settings.num_epochs)
        return (
            f"epoch {epoch}/{self.settings.num_epochs}",
            self.state.steps_done,
            len(self._batches),
        )

    def place(self) -> str:
        """Name the step under way."""
        return f"epoch {self.state.epoch + 1}, step {self.state.steps_done + 1}"

    def reached(self) -> str:
        """Say where training stops."""
        return f"in epoch {self.state.epoch + 1} after {self.state.steps_done} steps"

    # Checkpoints.

    def checkpoint(self) -> dict[str, Any]:
        """Return all that an exact continuation needs."""
        run_state = self.run.state_dict()
        state = asdict(self.state)
        own_name = {"best_score": f"best_{self.score}"}
        return {
            "epoch": state["epoch"],
            "steps_done": state["steps_done"],
            "model_state_dict": run_state.pop("model"),
            "optimizer_state_dict": run_state.pop("optimizer"),
            "scaler": run_state.get("scaler"),
            "run_state": run_state,
            "model_config": self.model_config(),
            "metrics": state["history"][-1] if state["history"] else {},
            "best_metric": state["best_score"],
            "training_state": {own_name.get(name, name): state[name] for name in state},
            "order_state": self._order.get_state()
            if self._order_state is None
            else self._order_state,
            "random_state": random_state(),
            **self.data_config(),
            "batch_size": self.settings.batch_size,
        }

    def save_interrupted(self) -> Path:
        """Write a checkpoint of this very step, and return its place."""
        path = self.folder.checkpoints / INTERRUPTED
        save_checkpoint(path, self.checkpoint())
        return path

    def resumed(self, checkpoint: dict[str, Any]) -> None:
        """Take up the state and the order of the rows."""
        own_name = {f"best_{self.score}": "best_score"}
        state: dict[str, Any] = dict(checkpoint["training_state"])
        # A checkpoint of before these were counted.
        state.setdefault("rows_done", state["steps_done"] * self.settings.batch_size)
        state.setdefault("num_steps", state["steps_done"])
        self.state = EpochState(**{own_name.get(name, name): state[name] for name in state})
        self._order.set_state(checkpoint["order_state"])
        self._write_history()

    def checkpoint_to_resume(self) -> dict[str, Any] | None:
        """Find the checkpoint that ``--resume-from-checkpoint`` asks for."""
        resume = self.settings.resume
        if resume is None:
            return None
        if resume == "auto":
            found = newest_checkpoint(self.folder.checkpoints, self.title)
        else:
            path = Path(resume)
            found = FoundCheckpoint(path, load_checkpoint(path, self.title), [])
        for reason in found.unreadable:
            self.console.print(f"Passed over {reason}", soft_wrap=True)
        epoch, steps = progress_of(found.content)
        further = f" and {steps} steps" if steps else ""
        self.console.print(
            f"Resuming from {found.path}: {epoch} epochs{further} done.", soft_wrap=True
        )
        here = {**self.model_config(), **self.data_config()}
        if steps:  # within an epoch that was cut into batches
            here["batch_size"] = self.settings.batch_size
        there = {**found.content, **found.content["model_config"]}
        refuse_other_run(found.path, there, here, flag="--resume-from-checkpoint")
        return found.content

    def save_final(self) -> None:
        """Write the final model; what an interruption has left is no longer needed."""
        save_checkpoint(self.folder.root / FINAL, self.checkpoint())
        (self.folder.checkpoints / INTERRUPTED).unlink(missing_ok=True)

    def load_best(self) -> tuple[str, int]:
        """Load the best validated weights into the model, and return their file and epoch."""
        path = self.folder.root / BEST
        if self.state.best_epoch is None or not path.is_file():
            return FINAL, self.state.epoch
        best = load_checkpoint(path, self.title)
        self.run.model.load_state_dict(self.model_state(best))
        return BEST, best["epoch"]


def load_checkpoint(path: Path, title: str) -> dict[str, Any]:
    """Read a checkpoint of a system onto the CPU.

    Raises:
        DataError: if the file is missing, cut off, or no checkpoint of that system.
    """
    return read_checkpoint(path, title, _NEEDED)


def newest_checkpoint(folder: Path, title: str) -> FoundCheckpoint:
    """Find the checkpoint that got furthest among those that can be read.

    Raises:
        DataError: if there is none.
    """
    best: FoundCheckpoint | None = None
    unreadable: list[str] = []
    for path in sorted(folder.glob("checkpoint_*.pt")):
        try:
            content = load_checkpoint(path, title)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if best is None or progress_of(content) > progress_of(best.content):
            best = FoundCheckpoint(path, content, unreadable)
    if best is None:
        reason = f"no checkpoint there can be read. {' '.join(unreadable)}".rstrip()
        raise DataError(str(folder), f"{reason} Leave --resume-from-checkpoint out to start anew.")
    return best


def progress_of(checkpoint: dict[str, Any]) -> tuple[int, int]:
    """Return whole epochs and further steps of a checkpoint, to tell which got further."""
    return checkpoint["epoch"], checkpoint.get("steps_done", 0)
