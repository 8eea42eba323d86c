"""WPO-SGM as a system to train: samples in, a mixture with an explicit density out."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from memfit.units import format_bytes
from memfit_workloads import train as training
from memfit_workloads.checkpoint_files import random_state, refuse_other_run, save_checkpoint
from memfit_workloads.memory_settings import plain_values
from memfit_workloads.peak_limit import check_peak
from memfit_workloads.planned_memory import PlannedMemory, plan_lines
from memfit_workloads.ranks import Ranks, is_a_rank, joined_ranks, start_ranks, usual_num_ranks
from memfit_workloads.run_files import RunFiles
from memfit_workloads.system import Outcome, System

from .centres import centres_of_rank, choose_centres
from .checkpoints import load_checkpoint, load_weights
from .data import DataSizes, load_samples
from .evaluation import negative_log_likelihood, score_matching
from .job import build_job, sizes_for
from .memory_estimate import estimate_lines, memory_line
from .memory_plan import evaluation_chunk, plan_training
from .model import KernelMixture
from .pictures import drawn_pictures, final_metrics, result_lines
from .sampling import draw
from .settings import TrainingSettings
from .sharing import MODEL_PARALLEL, sharing
from .whitening import Whitening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from memfit import Job


_LATEST, _BEST, _FINAL = "latest_checkpoint.pth", "best_model.pth", "final_model.pth"
_CENTRES, _WHITENING, _RESULT = "centers.pth", "whitening.pth", "result.json"
_LOG = ("step", "loss", "lr")
_WARM_SHARE = 0.3
_NUM_DECAYS = 3


def train(settings: TrainingSettings, console: Console) -> dict[str, Any]:
    """Train a mixture as the settings say, here or in several processes."""
    # TF32 would round the products of factors to ten bits; score matching takes differences.
    torch.backends.cuda.matmul.allow_tf32 = False
    if is_a_rank():
        with joined_ranks(settings.memory_settings.device) as ranks:
            return training.train(WpoSgmTraining(settings, console, ranks))
    if settings.strategy.name == MODEL_PARALLEL:
        return _shared(settings, settings.strategy.num_ranks, console)
    alone = WpoSgmTraining(settings, console, Ranks())
    found = sharing(settings, alone.step_of)
    if found.line:
        console.print(found.line, markup=False, soft_wrap=True)
    if found.num_ranks > 1:
        return _shared(settings, found.num_ranks, console)
    alone.planned_alone = found.alone
    return training.train(alone)


def _shared(settings: TrainingSettings, num_ranks: int | None, console: Console) -> dict[str, Any]:
    """Train in several processes, or plan for one of them."""
    # What is wrong with data and sizes is said once, and not by every rank.
    first = WpoSgmTraining(settings, console, Ranks(num_ranks=num_ranks or usual_num_ranks()))
    if settings.watching.dry_run:
        return training.train(first)
    start_ranks(shlex.split(settings.command)[1:], num_ranks, console)
    result: dict[str, Any] = json.loads((settings.folder / _RESULT).read_text())
    check_peak(result)
    return result


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


class WpoSgmTraining(System):
    """A mixture on one set of samples, its centres shared among the ranks."""

    name = "wpo-sgm"
    title = "WPO-SGM"
    remedy = "Lower --lr, or raise --stability."
    main_files = "report.html, samples.png, plan.yaml, loss_log.csv"
    settings: TrainingSettings
    state: TrainingState
    planned_alone: PlannedMemory | None = None
    """Made to decide among how many processes to train."""

    def __init__(self, settings: TrainingSettings, console: Console, ranks: Ranks) -> None:
        self.settings, self.console, self.ranks = settings, console, ranks
        told = settings.data
        parts = DataSizes(
            num_train=told.num_train, num_validation=told.num_validation, num_test=told.num_test
        )
        self.data = load_samples(told.name, parts, seed=settings.seed, folder=told.folder)
        self.whitening = Whitening.of(self.data.train) if told.whiten else None
        self.samples = self.whitening.samples(self.data) if self.whitening else self.data
        self.sizes = sizes_for(settings, self.samples.num_dimensions)
        self.centres = choose_centres(
            self.samples.train, self.sizes.num_centres, told.centre_choice, settings.seed
        )
        self.job, self.num_own = self.step_of(ranks.num_ranks, ranks.rank)
        self.state = TrainingState()
        self._choice = torch.Generator().manual_seed(settings.seed)
        self.folder = RunFiles(
            root=settings.folder,
            checkpoints=settings.folder,
            own=(
                *(_LATEST, _BEST, _FINAL, _CENTRES, _WHITENING),
                *("loss_log.csv", "training.log", _RESULT),
                *("samples.png", "density.png", "nearest.png"),
            ),
            final=(_FINAL, _RESULT),
            folder_flag="--save",
            resume_flag="--resume",
        )

    def step_of(self, num_ranks: int, rank: int = 0) -> tuple[Job, int]:
        """Describe the step of one of so many ranks, and count its centres."""
        own = centres_of_rank(self.centres, rank, num_ranks)
        return build_job(self.settings, self.sizes, own, self.samples, num_ranks), len(own)

    @property
    def mixture(self) -> KernelMixture:
        """Return the live mixture."""
        assert isinstance(self.run.model, KernelMixture), "the job's model() gives a KernelMixture"
        return self.run.model

    @property
    def chunk(self) -> int:
        """Return how many kernels are held at a time outside training."""
        planned = self.planned_memory
        return evaluation_chunk(planned.plan, planned.planned, self.samples.num_dimensions)

    def whitened(self, points: Tensor) -> Tensor:
        """Map points (N, D) of the data to the coordinates of training."""
        return points if self.whitening is None else self.whitening.apply(points)

    def unwhitened(self, points: Tensor) -> Tensor:
        """Map points (N, D) of training to those of the data."""
        return points if self.whitening is None else self.whitening.undo(points)

    # Before the first step.

    def checkpoint_to_resume(self) -> dict[str, Any] | None:
        """Read the latest checkpoint, if it belongs to this run."""
        if not self.settings.resume:
            return None
        path = self.folder.root / _LATEST
        content = load_checkpoint(path)
        there = {**content["model_config"], **content["training"]}
        here = {**self.sizes.to_json(), **self._identity()}
        refuse_other_run(path, there, here, flag="--resume")
        if self.ranks.is_first:
            self.console.print(f"Resuming from {path}: {content['step']} steps done.")
        return content

    def plan(self) -> PlannedMemory:
        """Find the plan that the strategy asks for."""
        return self.planned_alone or plan_training(self.job, self.settings, self.num_own)

    def estimate(self) -> list[str]:
        """Return the memory estimate that the document prints."""
        return estimate_lines(self.planned_memory.plain, self.sizes, self.num_own)

    def config(self) -> dict[str, Any]:
        """Return what is trained, and how."""
        return {
            "training": plain_values(self.settings),
            "model": self.sizes.to_json(),
            "num_ranks": self.ranks.num_ranks,
            **self.planned_memory.to_json(),
        }

    def write_inputs(self) -> None:
        """Write the centres of the whole mixture, and the map to the coordinates of training."""
        if self.whitening is not None:
            save_checkpoint(self.folder.root / _WHITENING, asdict(self.whitening))
        save_checkpoint(self.folder.root / _CENTRES, self.centres)
        self.folder.append("training.log", (*self.estimate(), *plan_lines(self.planned_memory)))

    def begin(self) -> None:
        """Join the other ranks, and begin with the same weights and random state."""
        self._device = next(self.run.model.parameters()).device
        self.mixture.group = self.ranks.group
        self.ranks.same(list(self.mixture.parameters()))
        self._schedule = _build_schedule(
            self.settings.scheduler, self.run.optimizer, self.settings.num_steps
        )
        torch.manual_seed(self.settings.seed)

    # The loop.

    def is_over(self) -> bool:
        """Return whether all steps are done."""
        return self.state.step >= self.settings.num_steps

    def next_batch(self) -> Tensor:
        """Draw samples, and what noise was asked for along with them."""
        train, variance = self.samples.train, self.settings.data.noise
        rows = torch.randint(0, len(train), (self.settings.batch_size,), generator=self._choice)
        samples = train[rows]
        if variance:
            noise = torch.randn(samples.shape, generator=self._choice)
            samples = samples + math.sqrt(variance) * noise
        return samples.to(self._device)

    def step_done(self, loss: float, seconds: float) -> None:
        """Note the step, and go on in the schedule."""
        del seconds
        learning_rate = self.run.optimizer.param_groups[0]["lr"]
        if not _follows_validation(self._schedule):
            self._schedule.step()
        self.state.step += 1
        self.state.log.append({"step": self.state.step, "loss": loss, "lr": learning_rate})

    def after_step(self) -> None:
        """Validate and save what is due."""
        if self._is_due(self.settings.eval_every):
            self._validate()
        if self._is_due(self.settings.checkpoint_every):
            self.save_interrupted()

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.is_over()

    def _validate(self) -> None:
        """Evaluate the validation samples, and note it."""
        state, samples = self.state, self.samples.validation
        recent = [line["loss"] for line in state.log[-self.settings.eval_every :]]
        nll = negative_log_likelihood(self.mixture, samples, chunk=self.chunk)
        nll -= self.samples.log_volume
        line = {
            "step": state.step,
            "loss": sum(recent) / len(recent),
            "valid_nll": nll if math.isfinite(nll) else None,
            "valid_objective": score_matching(self.mixture, samples, chunk=self.chunk),
            "measured_peak_bytes": self.run.measured_peak_bytes,
        }
        state.history.append(line)
        if _follows_validation(self._schedule):
            self._schedule.step(line["valid_objective"])
        if math.isfinite(nll) and (state.best_nll is None or nll < state.best_nll):
            state.best_step, state.best_nll = state.step, nll
            if self.ranks.is_first:
                save_checkpoint(self.folder.root / _BEST, self.mixture.network.state_dict())
        self.ranks.check_in_step(list(self.run.model.parameters()))
        if self.ranks.is_first:
            self.folder.write_lines("metrics.jsonl", state.history)
            self._tell(
                f"step {state.step}: loss {line['loss']:.4f}, valid NLL {nll:.4f}, "
                f"valid objective {line['valid_objective']:.4f}",
                memory_line(self._device, self.run.measured_peak_bytes),
            )

    def _tell(self, *lines: str) -> None:
        """Print lines, and add them to the log at once, so that it can be followed."""
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)
        self.folder.append("training.log", lines)

    def progress(self) -> tuple[str, int, int]:
        """Return loss and peak, and the steps."""
        peak = self.run.measured_peak_bytes
        memory = "" if peak is None else f", peak {format_bytes(peak)}"
        loss = self.state.log[-1]["loss"]
        return f"loss {loss:.3f}{memory}", self.state.step, self.settings.num_steps

    def place(self) -> str:
        """Name the step under way."""
        return f"step {self.state.step + 1}"

    def reached(self) -> str:
        """Say where training stops."""
        return f"after {self.state.step} steps"

    # Checkpoints.

    def checkpoint(self) -> dict[str, Any]:
        """Get all that an exact continuation needs; the same on every rank but for the centres."""
        run_state = self.run.state_dict()
        run_state.pop("model")
        return {
            "step": self.state.step,
            "model_state_dict": self.mixture.network.state_dict(),
            "optimizer_state_dict": run_state.pop("optimizer"),
            "run_state": run_state,
            "schedule_state": self._schedule.state_dict(),
            "model_config": self.mixture.sizes.to_json(),
            "training": self._identity(),
            "training_state": asdict(self.state),
            "choice_state": self._choice.get_state(),
            "random_state": random_state(),
            "seed": self.settings.seed,
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a continuation must share with the run that it continues."""
        settings = self.settings
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

    def save_interrupted(self) -> Path:
        """Write the log and a checkpoint of this very step, and return its place."""
        path = self.folder.root / _LATEST
        if self.ranks.is_first:
            text = io.StringIO()
            writer = csv.DictWriter(text, _LOG, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.state.log)
            self.folder.write("loss_log.csv", text.getvalue())
            save_checkpoint(path, self.checkpoint())
        return path

    def model_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the network that a checkpoint holds, beside the centres of this rank."""
        network = checkpoint["model_state_dict"]
        named = {f"network.{name}": tensor for name, tensor in network.items()}
        return {**named, "centres": self.mixture.centres}

    def resumed(self, checkpoint: dict[str, Any]) -> None:
        """Take up the state, the schedule and what samples are drawn with."""
        self._schedule.load_state_dict(checkpoint["schedule_state"])
        self.state = TrainingState(**checkpoint["training_state"])
        self._choice.set_state(checkpoint["choice_state"])

    def save_final(self) -> None:
        """Write the network's weights as the job built it."""
        self.run.close()
        save_checkpoint(self.folder.root / _FINAL, self.mixture.network.state_dict())

    def outcome(self) -> Outcome:
        """Compare the best mixture with held-out data."""
        mixture = self._whole_mixture()
        if self.state.best_step is not None:
            mixture.network.load_state_dict(load_weights(self.folder.root / _BEST))
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = self.unwhitened(
            draw(mixture, self.settings.num_generated, generator, chunk=self.chunk)
        )
        metrics = final_metrics(self, mixture, drawn, generator)
        pictures = drawn_pictures(self, mixture, drawn)
        for name, content in pictures.items():
            self.folder.write(name, content)
        return Outcome(
            metrics=metrics,
            own={
                "num_steps": self.state.step,
                "best_step": self.state.best_step,
                "num_ranks": self.ranks.num_ranks,
            },
            lines=result_lines(metrics),
            pictures=tuple(pictures),
        )

    def _whole_mixture(self) -> KernelMixture:
        """Return the trained mixture with the centres of all ranks."""
        trained = self.mixture
        trained.group = None
        if self.ranks.group is None:
            return trained
        whole = KernelMixture(trained.sizes, self.centres.to(trained.centres))
        whole.network = trained.network
        return whole.to(trained.centres.device)

    def write_results(self, result: dict[str, Any], lines: Sequence[str]) -> None:
        """Write the result, and add what was said at the end to the log."""
        self.folder.write_json(_RESULT, result)
        self.folder.append("training.log", lines)


def _build_schedule(name: str, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """Build a schedule that is told of every step.

    ``one_cycle`` rises for 30 % of the steps and falls as a cosine; ``step`` divides by ten three
    times; ``reduce_on_plateau`` halves after ten validations without a better one.
    """
    if name == "one_cycle":
        peak = optimizer.param_groups[0]["lr"]
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=peak, total_steps=num_steps + 1, pct_start=_WARM_SHARE
        )
    if name == "cosine_annealing":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    if name == "step":
        each = max(1, num_steps // (_NUM_DECAYS + 1))
        return lr_scheduler.StepLR(optimizer, step_size=each, gamma=0.1)
    if name == "reduce_on_plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5)
    return lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _follows_validation(schedule: Any) -> bool:
    """Return whether a schedule goes by validations, not by steps."""
    return isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
