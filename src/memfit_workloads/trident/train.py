"""TRIDENT-Net as a system to train: clips in, two nested outcomes out."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memfit.errors import MissingExtraError, NoPlanFitsError
from memfit.strategies.four_bit_base import merged_state_dict
from memfit_workloads import train as training
from memfit_workloads.epochs import BEST, FINAL, HISTORY, EpochSystem
from memfit_workloads.memory_settings import plain_values
from memfit_workloads.planned_memory import devices
from memfit_workloads.run_files import RunFiles
from memfit_workloads.system import Outcome

from .benchmark_table import table
from .calibration import calibration_picture
from .deepspeed_file import check_beside_job, read_deepspeed_file
from .embedding_cache import embedding_files
from .evaluation import Answers, answers_for, branch_aurocs, outcome_metrics
from .four_bit import four_bit_base
from .frozen_training import FrozenMemory, FrozenTraining
from .host_branches import host_branches
from .job import CLIP_GRAD_NORM, StepSettings, build_job
from .offload_folder import room_bytes, spilling_to
from .placement_lines import placement_lines
from .precision_plan import plan_with_precision
from .reading import ClipReader, WaitingWatch
from .remedies import with_remedies
from .settings import ADAMW, PAGED_ADAMW_8BIT, TridentSettings
from .sources import open_clips
from .table_settings import TableSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from memfit.strategies.base import Strategy
    from memfit_workloads.memory_settings import MemorySettings
    from memfit_workloads.planned_memory import PlannedMemory


_TEST_RESULTS, _CALIBRATION = "test_results.json", "calibration.png"
_PAGING = (
    "--optimizer paged_adamw8bit: states are kept in 8 bits and not in pages; 2 bytes per weight "
    "leave little to page. The planner moves states to the host where the budget asks for it."
)
_OFFLOAD = "optimizer-offload"


def train(settings: TridentSettings | TableSettings, console: Console) -> dict[str, Any]:
    """Train TRIDENT-Net as told, and test it with the best weights; or write clips, or a table."""
    if isinstance(settings, TableSettings):
        return table(console, is_live=settings.is_live)
    if settings.data.write_clips is not None:
        from .writing import write_clips

        return write_clips(settings, console)
    if settings.placement.deepspeed_config is not None:
        file = read_deepspeed_file(settings.placement.deepspeed_config)
        check_beside_job(file, settings.batch_size, CLIP_GRAD_NORM)
    with spilling_to(settings.placement.offload_folder):
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
        job = build_job(
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
        self._frozen = (
            FrozenTraining(settings, job, self._clips) if settings.branches.frozen else None
        )
        self.job = job if self._frozen is None else self._frozen.job
        root = settings.output_dir
        # With frozen branches, what is not of this run is found out by its name.
        earlier = () if self._frozen else embedding_files(root)
        self.folder = RunFiles(
            root=root,
            checkpoints=root / "checkpoints",
            own=(
                *(BEST, FINAL, HISTORY, _TEST_RESULTS, _CALIBRATION),
                *(str(path.relative_to(root)) for path in earlier),
            ),
            final=(FINAL, _TEST_RESULTS, _CALIBRATION),
        )
        num_workers = settings.data.num_workers
        pool = ThreadPoolExecutor(num_workers) if num_workers else None
        self._readers = {
            name: ClipReader(getattr(self._clips, name), pool)
            for name in ("train", "valid", "test")
        }
        self._waiting = WaitingWatch(self._readers["train"], num_workers)

    def plan(self) -> PlannedMemory:
        """Find the plan to train under."""
        memory = replace(placed_memory(self.settings), num_steps=self.most_steps)
        settings = replace(self.settings, memory_settings=memory)
        try:
            if self._frozen is not None:
                return self._frozen.plan(settings)
            return plan_with_precision(
                self.job,
                settings.memory_settings,
                settings.micro_batch_size,
                settings.branches.kept,
                fixed_strategies(settings),
            )
        except NoPlanFitsError as error:
            raise with_remedies(error, self.settings) from error

    def estimate(self) -> list[str]:
        """Say what flags do not do or do otherwise, and what there is to know of the clips."""
        planned = self.planned_memory
        paging = [_PAGING] if self.settings.optimizer == PAGED_ADAMW_8BIT else []
        placement = placement_lines(self.settings, is_on_cpu=planned.run_device == "cpu")
        lines = [*self._clips.notes, *paging, *placement]
        if self._frozen is not None and isinstance(planned, FrozenMemory):
            lines += self._frozen.lines(planned)
        return lines

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
        """Read clips, and begin with those of the next step of the epoch."""
        following = self._batches[self.state.steps_done + 1 : self.state.steps_done + 2]
        batch = self._readers["train"].batch(
            rows.tolist(), [row for each in following for row in each.tolist()]
        )
        if self._pins:
            batch = {name: part.pin_memory() for name, part in batch.items()}
        return {
            name: part.to(self._device, non_blocking=self._pins) for name, part in batch.items()
        }

    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch: a cosine from the first to 0 after the last."""
        share = epoch / self.settings.num_epochs
        return 0.5 * self.settings.learning_rate * (1 + math.cos(math.pi * share))

    def after_step(self) -> None:
        """Say where steps wait for clips, once an epoch is over."""
        is_epoch_over = self.state.steps_done == len(self._batches)
        epoch_seconds = self.state.epoch_seconds
        super().after_step()
        said = self._waiting.epoch_done(epoch_seconds) if is_epoch_over else None
        if said is not None:
            self.console.print(said, markup=False, soft_wrap=True)

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
        return answers_for(self.run.model, self._readers[split], own)

    def model_config(self) -> dict[str, Any]:
        """Return the model's sizes."""
        return self.settings.sizes.to_json()

    def data_config(self) -> dict[str, Any]:
        """Return the number of clips, and what made them."""
        frozen = {"frozen_branches": None} if self._frozen is None else self._frozen.data_config()
        return {
            "num_clips": self.num_rows,
            "data_seed": self.settings.data.data_seed,
            "clips": self._clips.identity,
            **frozen,
        }

    def write_inputs(self) -> None:
        """Write the embeddings of frozen branches; the weights are all that is needed else."""
        if self._frozen is None:
            return
        planned = self.planned_memory
        assert isinstance(planned, FrozenMemory), "`plan` has made it"
        with self.console.status("embedding: the frozen branches are run once"):
            lines = self._frozen.prepare(self.settings, planned)
        for name in self._readers:
            clips = getattr(self._clips, name)
            self._readers[name] = ClipReader(clips, read=self._frozen.reader(name))
        self._waiting = WaitingWatch(self._readers["train"], self.settings.data.num_workers)
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)

    def checkpoint(self) -> dict[str, Any]:
        """Return all that an exact continuation needs, and the weights of frozen branches.

        Of packed weights, the plain ones.
        """
        content = super().checkpoint()
        if self.settings.placement.is_qlora:
            content["model_state_dict"] = merged_state_dict(self.run.model)
        if self._frozen is not None:
            rest = content["model_state_dict"]
            content["model_state_dict"] = self._frozen.branches.whole_state(rest)
        return content

    def model_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of what is trained."""
        whole = super().model_state(checkpoint)
        return whole if self._frozen is None else dict(self._frozen.branches.rest_of(whole))

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
                **self._own_results(),
            },
            lines=(_said(written),),
            pictures=self._pictures(test),
        )

    def _pictures(self, test: Answers) -> tuple[str, ...]:
        """Draw the calibration on the test clips, where matplotlib is installed."""
        try:
            self.folder.write(_CALIBRATION, calibration_picture(test))
        except MissingExtraError as error:
            self.console.print(f"No {_CALIBRATION}: {error}", soft_wrap=True)
            return ()
        return (_CALIBRATION,)

    def _own_results(self) -> dict[str, Any]:
        """Return what embedding took, where branches are frozen."""
        if self._frozen is None:
            return {}
        return {"measured_embedding_peak_bytes": self._frozen.measured_embedding_peak_bytes}

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


def placed_memory(settings: TridentSettings) -> MemorySettings:
    """Return the memory settings with what the flags of placement add to them."""
    memory, placement = settings.memory_settings, settings.placement
    folder = placement.offload_folder
    run_device, _ = devices(memory.device)
    memory = replace(
        memory,
        host_bytes=placement.host_bytes,
        disk_bytes=None if folder is None else room_bytes(folder),
    )
    has_place = run_device != "cpu" or folder is not None
    moves_states = placement.offloads_states and settings.optimizer == ADAMW and has_place
    if moves_states and memory.plan_file is None:
        memory = replace(memory, require=(*memory.require, _OFFLOAD))
    return memory


def fixed_strategies(settings: TridentSettings) -> tuple[Strategy, ...]:
    """Return what is part of the plan whatever the planner chooses.

    Raises:
        UsageError: if flags ask for two strategies that exclude each other.
    """
    fixed: list[Strategy] = []
    run_device, _ = devices(settings.memory_settings.device)
    if settings.placement.host_modules and run_device != "cpu":
        fixed.append(host_branches(settings))
    if settings.placement.is_qlora:
        fixed.append(four_bit_base(settings.sizes))
    return tuple(fixed)
