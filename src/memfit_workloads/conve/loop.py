"""The training loop: epochs, validation, checkpoints, and an exact way to stop and continue."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memfit.errors import MemfitError
from memfit_workloads.checkpoint_files import (
    INTERRUPTED,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from memfit_workloads.interruption import InterruptWatch

from .evaluation import Evaluation
from .queries import Queries, QueryBatch, batch_rows
from .run_folder import RunFolder
from .settings import TrainingSettings
from .sizes import ConvESizes

if TYPE_CHECKING:
    from rich.console import Console

    from memfit import Run


@dataclass(slots=True)
class TrainingState:
    """How far training has come; together with weights and random states it is all there is."""

    epoch: int = 0
    """Whole epochs done."""
    steps_done: int = 0
    """Steps done of the epoch under way."""
    loss_sum: float = 0.0
    """Over the rows of the epoch under way."""
    epoch_seconds: float = 0.0
    best_epoch: int | None = None
    best_mrr: float | None = None
    validations_since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class TrainingLoop:
    """Train a run's model epoch by epoch."""

    def __init__(
        self,
        run: Run,
        queries: Queries,
        evaluation: Evaluation,
        settings: TrainingSettings,
        *,
        sizes: ConvESizes,
        folder: RunFolder,
        console: Console,
    ) -> None:
        self.run = run
        self.state = TrainingState()
        self._queries = queries
        self.evaluation = evaluation
        self._settings = settings
        self._sizes = sizes
        self._folder = folder
        self._console = console
        self._order = torch.Generator().manual_seed(settings.random_seed)
        self._device = next(run.model.parameters()).device
        torch.manual_seed(settings.random_seed)

    def fit(self) -> None:
        """Train to the last epoch, or until validation has not improved for long enough.

        Raises:
            MemfitError: if the loss or a validation score is no number.
            KeyboardInterrupt: after Ctrl-C, once a checkpoint of this very step is written.
        """
        with InterruptWatch() as watch, self._progress_bar() as bar:
            while not self._is_over():
                self._train_epoch(watch, bar)
                self._finish_epoch()

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Take up everything that a checkpoint of this training run holds."""
        self.run.load_state_dict(
            {
                "model": checkpoint["model_state_dict"],
                "optimizer": checkpoint["optimizer_state_dict"],
                **checkpoint["run_state"],
            }
        )
        self.state = TrainingState(**checkpoint["training_state"])
        self._order.set_state(checkpoint["order_state"])
        restore_random_state(checkpoint["random_state"])
        self._folder.write_history(self.state.history)

    def checkpoint(self, order_state: torch.Tensor | None = None) -> dict[str, Any]:
        """Return all that an exact continuation needs.

        Args:
            order_state: the generator of the data order as it was before the epoch under way;
                None between epochs.
        """
        run_state = self.run.state_dict()
        state = self.state
        training_state = {name: getattr(state, name) for name in TrainingState.__slots__}
        return {
            "epoch": state.epoch,
            "steps_done": state.steps_done,
            "model_state_dict": run_state.pop("model"),
            "optimizer_state_dict": run_state.pop("optimizer"),
            "scaler": run_state.get("scaler"),
            "run_state": run_state,
            "model_config": self._sizes.to_json(),
            "metrics": state.history[-1] if state.history else {},
            "best_metric": state.best_mrr,
            "training_state": {**training_state, "history": list(state.history)},
            "order_state": self._order.get_state() if order_state is None else order_state,
            "random_state": random_state(),
            "num_queries": len(self._queries),
            "batch_size": self._settings.batch_size,
        }

    def _is_over(self) -> bool:
        patience = self._settings.early_stopping_patience
        if patience is not None and self.state.validations_since_best >= patience:
            return True
        return self.state.epoch >= self._settings.num_epochs

    def _train_epoch(self, watch: InterruptWatch, bar: Progress) -> None:
        """Run the steps of an epoch that are still to be done."""
        state, settings = self.state, self._settings
        for group in self.run.optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.learning_rate_decay**state.epoch
        order_state = self._order.get_state()
        order = torch.randperm(len(self._queries), generator=self._order)
        batches = batch_rows(order, settings.batch_size)
        task = bar.add_task(
            f"epoch {state.epoch + 1}/{settings.num_epochs}",
            total=len(batches),
            completed=state.steps_done,
        )
        for rows in batches[state.steps_done :]:
            if watch.is_requested:
                self._interrupt(order_state)
            self._step(rows)
            bar.advance(task)
        bar.remove_task(task)

    def _step(self, rows: torch.Tensor) -> None:
        started = time.perf_counter()
        batch = self._queries.batch(rows)
        result = self.run.step(QueryBatch(*(part.to(self._device) for part in batch)))
        loss = float(result.loss)
        if not math.isfinite(loss):
            msg = (
                f"The loss is {loss} in epoch {self.state.epoch + 1}, step "
                f"{self.state.steps_done + 1}. No final model is written; the checkpoints before "
                f"it stay in {self._folder.checkpoints}. Lower --learning-rate, or leave out "
                "--use-mixed-precision."
            )
            raise MemfitError(msg)
        self.state.loss_sum += loss * len(rows)
        self.state.steps_done += 1
        self.state.epoch_seconds += time.perf_counter() - started

    def _finish_epoch(self) -> None:
        """Validate, note what the epoch gave, and write what is due."""
        state, settings = self.state, self._settings
        state.epoch += 1
        is_last = state.epoch == settings.num_epochs
        valid = None
        if is_last or state.epoch % settings.eval_every == 0:
            model: Any = self.run.model
            valid = self.evaluation.metrics(model, self.evaluation.graph.valid)
        self._note_epoch(valid)
        is_best = valid is not None and self._note_validation(valid["both"]["mrr"])
        self._folder.write_history(state.history)
        if is_best:
            save_checkpoint(self._folder.best_model, self.checkpoint())
        if self._is_over() or state.epoch % settings.checkpoint_frequency == 0:
            save_checkpoint(self._folder.checkpoint(state.epoch), self.checkpoint())

    def _note_epoch(self, valid: dict[str, Any] | None) -> None:
        """Turn the sums of the epoch into a line of history, and begin them anew."""
        state = self.state
        prediction = self.run.plan.prediction
        line = {
            "epoch": state.epoch,
            "loss": state.loss_sum / len(self._queries),
            "learning_rate": self.run.optimizer.param_groups[0]["lr"],
            "valid_mrr": None if valid is None else valid["both"]["mrr"],
            "valid": valid,
            "seconds": state.epoch_seconds,
            "predicted_peak_bytes": prediction.peak_allocated_bytes if prediction else None,
            "measured_peak_bytes": self.run.measured_peak_bytes,
        }
        state.history.append(line)
        state.steps_done, state.loss_sum, state.epoch_seconds = 0, 0.0, 0.0
        if valid is not None:
            self._console.print(
                f"epoch {line['epoch']}: loss {line['loss']:.5f}, "
                f"valid MRR {line['valid_mrr']:.4f}, {line['seconds']:.2f} s"
            )

    def _note_validation(self, mrr: float) -> bool:
        """Return whether this is the best validation so far."""
        state = self.state
        if state.best_mrr is not None and mrr <= state.best_mrr:
            state.validations_since_best += 1
            return False
        state.best_mrr, state.best_epoch, state.validations_since_best = mrr, state.epoch, 0
        return True

    def _interrupt(self, order_state: torch.Tensor) -> NoReturn:
        """Save this very step, say how to go on, and stop."""
        path = self._folder.checkpoints / INTERRUPTED
        save_checkpoint(path, self.checkpoint(order_state))
        self._console.print(
            f"Interrupted in epoch {self.state.epoch + 1} after {self.state.steps_done} steps. "
            f"Saved as {path}. Continue exactly there with:\n"
            f"{resume_command(self._settings.command)}",
            soft_wrap=True,
        )
        raise KeyboardInterrupt

    def _progress_bar(self) -> Progress:
        """Show steps where someone is watching."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )


def resume_command(command: str) -> str:
    """Write the command line that continues a run from its newest checkpoint."""
    words = command.replace(" --overwrite", "")
    return f"{words} --resume-from-checkpoint auto"
