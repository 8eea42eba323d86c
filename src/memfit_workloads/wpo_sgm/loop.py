"""The training loop: steps, validation, checkpoints, and an exact way to stop and continue."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from memfit.errors import MemfitError
from memfit.units import format_bytes
from memfit_workloads.checkpoint_files import (
    random_state,
    restore_random_state,
    save_checkpoint,
)
from memfit_workloads.interruption import InterruptWatch

from .data import Samples
from .evaluation import negative_log_likelihood, score_matching
from .model import KernelMixture
from .ranks import Ranks
from .run_folder import RunFolder
from .schedules import build_schedule, follows_validation
from .settings import TrainingSettings

if TYPE_CHECKING:
    from rich.console import Console

    from memfit import Run


@dataclass(slots=True)
class TrainingState:
    """How far training has come; together with weights and random states it is all there is."""

    step: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)
    """Step, loss and learning rate of every step."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """What every validation gave."""
    best_step: int | None = None
    best_nll: float | None = None
    """The least on the validation samples so far."""


class TrainingLoop:
    """Train a run's mixture for a number of steps."""

    def __init__(
        self,
        run: Run,
        samples: Samples,
        settings: TrainingSettings,
        *,
        evaluation_chunk: int,
        folder: RunFolder,
        ranks: Ranks,
        console: Console,
    ) -> None:
        self.run = run
        self.state = TrainingState()
        self._samples = samples
        self._settings = settings
        self._evaluation_chunk = evaluation_chunk
        self._folder = folder
        self._ranks = ranks
        self._console = console
        self._choice = torch.Generator().manual_seed(settings.seed)
        self._device = next(run.model.parameters()).device
        self._schedule = build_schedule(settings.scheduler, run.optimizer, settings.num_steps)
        torch.manual_seed(settings.seed)

    @property
    def mixture(self) -> KernelMixture:
        """Return the live mixture."""
        assert isinstance(self.run.model, KernelMixture), "the job's model() gives a KernelMixture"
        return self.run.model

    def fit(self) -> None:
        """Train to the last step.

        Raises:
            MemfitError: if the loss is no number, or the ranks' networks differ.
            KeyboardInterrupt: after Ctrl-C, once a checkpoint of this very step is written.
        """
        settings = self._settings
        is_patient = self._ranks.group is not None
        with InterruptWatch(is_patient=is_patient) as watch, self._progress_bar() as bar:
            task = bar.add_task("step", total=settings.num_steps, completed=self.state.step)
            while self.state.step < settings.num_steps:
                if self._ranks.any(watch.is_requested, self._device):
                    self._interrupt()
                self._step()
                if self._is_due(settings.eval_every):
                    self._validate()
                if self._is_due(settings.checkpoint_every):
                    self._save()
                bar.update(task, completed=self.state.step, description=self._description())

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Take up everything that a checkpoint of this training run holds."""
        state = {
            f"network.{name}": tensor for name, tensor in checkpoint["model_state_dict"].items()
        }
        self.run.load_state_dict(
            {
                "model": {**state, "centres": self.mixture.centres},
                "optimizer": checkpoint["optimizer_state_dict"],
                **checkpoint["run_state"],
            }
        )
        self._schedule.load_state_dict(checkpoint["schedule_state"])
        self.state = TrainingState(**checkpoint["training_state"])
        self._choice.set_state(checkpoint["choice_state"])
        restore_random_state(checkpoint["random_state"])

    def checkpoint(self) -> dict[str, Any]:
        """Get all that an exact continuation needs; the same on every rank but for the centres."""
        run_state = self.run.state_dict()
        run_state.pop("model")
        state = self.state
        return {
            "step": state.step,
            "model_state_dict": self.mixture.network.state_dict(),
            "optimizer_state_dict": run_state.pop("optimizer"),
            "run_state": run_state,
            "schedule_state": self._schedule.state_dict(),
            "model_config": self.mixture.sizes.to_json(),
            "training": identity(self._settings),
            "training_state": {
                **{name: getattr(state, name) for name in TrainingState.__slots__},
                "log": list(state.log),
                "history": list(state.history),
            },
            "choice_state": self._choice.get_state(),
            "random_state": random_state(),
            "seed": self._settings.seed,
        }

    def _step(self) -> None:
        train, settings = self._samples.train, self._settings
        rows = torch.randint(0, len(train), (settings.batch_size,), generator=self._choice)
        learning_rate = self.run.optimizer.param_groups[0]["lr"]
        samples = self._noised(train[rows])
        loss = float(self.run.step(samples.to(self._device)).loss)
        if not math.isfinite(loss):
            msg = (
                f"The loss is {loss} in step {self.state.step + 1}. No final model is written; the "
                f"last checkpoint stays in {self._folder.root}. Lower --lr, or raise --stability."
            )
            raise MemfitError(msg)
        if not follows_validation(self._schedule):
            self._schedule.step()
        self.state.step += 1
        self.state.log.append({"step": self.state.step, "loss": loss, "lr": learning_rate})

    def _noised(self, samples: Tensor) -> Tensor:
        """Add what noise was asked for, drawn along with the choice of samples."""
        variance = self._settings.data.noise
        if not variance:
            return samples
        noise = torch.randn(samples.shape, generator=self._choice)
        return samples + math.sqrt(variance) * noise

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self._settings.num_steps

    def _validate(self) -> None:
        """Evaluate the validation samples, and note it."""
        state, chunk = self.state, self._evaluation_chunk
        recent = [line["loss"] for line in state.log[-self._settings.eval_every :]]
        validation = self._samples.validation
        nll = negative_log_likelihood(self.mixture, validation, chunk=chunk)
        nll -= self._samples.log_volume
        line = {
            "step": state.step,
            "loss": sum(recent) / len(recent),
            "valid_nll": nll if math.isfinite(nll) else None,
            "valid_objective": score_matching(self.mixture, validation, chunk=chunk),
            "measured_peak_bytes": self.run.measured_peak_bytes,
        }
        state.history.append(line)
        if follows_validation(self._schedule):
            self._schedule.step(line["valid_objective"])
        if math.isfinite(nll) and (state.best_nll is None or nll < state.best_nll):
            state.best_step, state.best_nll = state.step, nll
            if self._ranks.is_first:
                save_checkpoint(self._folder.best_model, self.mixture.network.state_dict())
        self._ranks.check_in_step(list(self.run.model.parameters()))
        if self._ranks.is_first:
            self._folder.write_lines("metrics.jsonl", state.history)
            self._console.print(
                f"step {state.step}: loss {line['loss']:.4f}, valid NLL {nll:.4f}, "
                f"valid objective {line['valid_objective']:.4f}"
            )

    def _save(self) -> None:
        if self._ranks.is_first:
            self._folder.write_log(self.state.log)
            save_checkpoint(self._folder.latest_checkpoint, self.checkpoint())

    def _interrupt(self) -> NoReturn:
        """Save this very step, say how to go on, and stop."""
        self._save()
        if self._ranks.is_first:
            command = self._settings.command.replace(" --overwrite", "")
            self._console.print(
                f"Interrupted after {self.state.step} steps. Saved as "
                f"{self._folder.latest_checkpoint}. Continue exactly there with:\n"
                f"{command} --resume",
                soft_wrap=True,
            )
        self._ranks.wait()
        raise KeyboardInterrupt

    def _description(self) -> str:
        peak = self.run.measured_peak_bytes
        memory = "" if peak is None else f", peak {format_bytes(peak)}"
        return f"loss {self.state.log[-1]['loss']:.3f}{memory}"

    def _progress_bar(self) -> Progress:
        """Show steps where someone is watching."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (self._console.is_terminal and self._ranks.is_first),
        )


def identity(settings: TrainingSettings) -> dict[str, Any]:
    """Return what a continuation must share with the run that it continues."""
    return {
        "data": settings.data.name,
        "num_train": settings.data.num_train,
        "whiten": settings.data.whiten,
        "data_noise": settings.data.noise,
        "centers": settings.data.centre_choice,
        "batch_size": settings.batch_size,
        "num_steps": settings.num_steps,
        "scheduler": settings.scheduler,
        "seed": settings.seed,
    }
