"""TRIDENT-Net as a system to train: clips in, two nested outcomes out."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memfit_workloads import train as training
from memfit_workloads.epochs import BEST, FINAL, HISTORY, EpochSystem
from memfit_workloads.memory_settings import plain_values
from memfit_workloads.run_files import RunFiles
from memfit_workloads.system import Outcome

from .benchmark_table import table
from .clips import collate
from .evaluation import Answers, answers_for, branch_aurocs, outcome_metrics
from .job import StepSettings, build_job
from .memory_plan import plan_training
from .settings import PAGED_ADAMW_8BIT, TridentSettings
from .sources import open_clips
from .table_settings import TableSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from memfit_workloads.planned_memory import PlannedMemory

_TEST_RESULTS, _CALIBRATION = "test_results.json", "calibration.png"
_PAGING = (
    "--optimizer paged_adamw8bit: states are kept in 8 bits and not in pages; 2 bytes per weight "
    "leave little to page. The planner moves states to the host where the budget asks for it."
)


def train(settings: TridentSettings | TableSettings, console: Console) -> dict[str, Any]:
    """Train TRIDENT-Net as the settings say, and test it with the best weights; or show a table."""
    if isinstance(settings, TableSettings):
        return table(console, is_live=settings.is_live)
    return training.train(TridentTraining(settings, console))


class TridentTraining(EpochSystem):
    """TRIDENT-Net on clips of one source."""

    name = "trident"
    title = "TRIDENT-Net"
    score = "auroc"
    remedy = "Lower --learning-rate, or leave out --use-bf16 or --use-fp16."
    main_files = "report.html, plan.yaml, metrics.jsonl, best_model.pt"
    settings: TridentSettings

    def __init__(self, settings: TridentSettings, console: Console) -> None:
        super().__init__(settings, console)
        self._begin_seconds = time.perf_counter()
        self._clips = open_clips(settings.data, settings.sizes)
        self.job = build_job(
            settings.sizes,
            StepSettings(
                batch_size=min(settings.batch_size, len(self._clips.train)),
                learning_rate=settings.learning_rate,
                weight_decay=settings.weight_decay,
                seed=settings.random_seed,
                has_masks=self._clips.train.has_masks,
                has_boxes=self._clips.train.has_boxes,
            ),
        )
        self.folder = RunFiles(
            root=settings.output_dir,
            checkpoints=settings.output_dir / "checkpoints",
            own=(BEST, FINAL, HISTORY, _TEST_RESULTS, _CALIBRATION),
            final=(FINAL, _TEST_RESULTS, _CALIBRATION),
        )
        num_workers = settings.data.num_workers
        self._pool = ThreadPoolExecutor(num_workers) if num_workers else None

    def plan(self) -> PlannedMemory:
        """Find the plan to train under."""
        return plan_training(
            self.job, self.settings.memory_settings, self.settings.micro_batch_size
        )

    def estimate(self) -> list[str]:
        """Say what a flag does not do."""
        return [_PAGING] if self.settings.optimizer == PAGED_ADAMW_8BIT else []

    @property
    def num_rows(self) -> int:
        """Return the number of clips to train on."""
        return len(self._clips.train)

    def begin(self) -> None:
        """Find out where the model lies."""
        super().begin()
        self._device = next(self.run.model.parameters()).device
        self._pins = self.settings.data.pin_memory and self._device.type == "cuda"

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Read clips."""
        batch = collate(self._clips.train, rows.tolist(), self._pool)
        if self._pins:
            batch = {name: part.pin_memory() for name, part in batch.items()}
        return {
            name: part.to(self._device, non_blocking=self._pins) for name, part in batch.items()
        }

    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch: a cosine from the first to 0 after the last."""
        share = epoch / self.settings.num_epochs
        return 0.5 * self.settings.learning_rate * (1 + math.cos(math.pi * share))

    def validate(self) -> tuple[float, dict[str, Any]]:
        """Return the AUROC of an event, and all metrics, on the validation clips."""
        metrics = outcome_metrics(self._answers("valid"))
        score = metrics["event_auroc"]
        assert score is not None, "the clips to validate on have events and others"
        return score, metrics

    def _answers(self, split: str) -> Answers:
        """Answer with the weights as they are, as many clips at a time as a step has."""
        splits = {strategy.name: strategy for strategy in self.run.plan.strategies}
        own = getattr(splits.get("micro-batching"), "micro_batch_size", self.job.batch_size)
        return answers_for(self.run.model, getattr(self._clips, split), own)

    def model_config(self) -> dict[str, Any]:
        """Return the model's sizes."""
        return self.settings.sizes.to_json()

    def data_config(self) -> dict[str, Any]:
        """Return the number of clips, and what made them."""
        data = self.settings.data
        return {"num_clips": self.num_rows, "data_seed": data.data_seed}

    def write_inputs(self) -> None:
        """Write nothing: the weights are all that is needed."""

    def config(self) -> dict[str, Any]:
        """Put together what config.json says: data, model, training, memory."""
        settings, planned = self.settings, self.planned_memory
        told = plain_values(settings)
        data, flags = told.pop("data"), told.pop("memory_settings")
        told.pop("sizes")
        splits = {f"num_{name}": len(getattr(self._clips, name)) for name in ("valid", "test")}
        return {
            "data": {**data, "num_train": self.num_rows, **splits},
            "model": settings.sizes.to_json(),
            "training": told,
            "memory": {
                **planned.to_json(),
                "device": planned.run_device,
                "allow": flags["allow"],
                "require": flags["require"],
                "forbid": flags["forbid"],
            },
        }

    def outcome(self) -> Outcome:
        """Test the weights of the best validation, all together and branch by branch."""
        name, epoch = self.load_best()
        test = self._answers("test")
        metrics = outcome_metrics(test)
        branches = branch_aurocs(self._answers("train"), test)
        written = {"model": name, "epoch": epoch, **metrics, "branches": branches}
        return Outcome(
            metrics={
                "loss": self.state.history[-1]["loss"],
                "valid_auroc": self.state.best_score,
                **{f"test_{name}": value for name, value in metrics.items()},
                **{f"test_{name}_alone_auroc": value for name, value in branches.items()},
            },
            own={
                "test": written,
                "num_epochs": self.state.epoch,
                "best_epoch": self.state.best_epoch,
                "elapsed_seconds": time.perf_counter() - self._begin_seconds,
            },
            lines=(_said(written),),
        )

    def write_results(self, result: dict[str, Any], lines: Sequence[str]) -> None:
        """Write the metrics of the test clips."""
        del lines
        self.folder.write_json(_TEST_RESULTS, result["test"])


def _said(test: dict[str, Any]) -> str:
    """Write the results of the test clips in a line."""
    alone = ", ".join(f"{name} {_figure(value)}" for name, value in test["branches"].items())
    return (
        f"test ({test['model']}, epoch {test['epoch']}): AUROC of an event "
        f"{_figure(test['event_auroc'])}, of a severe one {_figure(test['severe_auroc'])}, "
        f"calibration error {test['event_ece']:.3f}; branches alone: {alone}"
    )


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
