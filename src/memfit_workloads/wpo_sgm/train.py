"""``memfit train wpo-sgm``: from flags to a trained mixture inside a memory budget."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.errors import MissingExtraError
from memfit_workloads.checkpoint_files import save_checkpoint
from memfit_workloads.planned_memory import (
    PlannedMemory,
    peaks_line,
    show_plan,
    write_report_if_possible,
)

from .checkpoints import check_belongs, load_checkpoint, load_weights
from .data import DataSizes, Samples, load_samples
from .evaluation import (
    compare,
    density_estimate,
    gaussian_negative_log_likelihood,
    negative_log_likelihood,
)
from .job import build_job, sizes_for
from .loop import TrainingLoop, identity
from .memory_estimate import MemoryEstimate
from .memory_plan import evaluation_chunk, plan_training
from .model import KernelMixture
from .pictures import density_picture, nearest_picture, sample_picture
from .ranks import JoinedRanks, Ranks
from .run_folder import RunFolder
from .sampling import draw
from .settings import TrainingSettings

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What a run consists of."""

    settings: TrainingSettings
    samples: Samples
    centres: Tensor
    """Of the whole mixture."""
    planned_memory: PlannedMemory
    folder: RunFolder
    ranks: Ranks
    console: Console

    @property
    def evaluation_chunk(self) -> int:
        """Give how many kernels are held at a time outside training."""
        planned_memory = self.planned_memory
        return evaluation_chunk(
            planned_memory.plan, planned_memory.planned, self.samples.num_dimensions
        )


def train(settings: TrainingSettings, console: Console) -> dict[str, Any]:
    """Train a mixture as the settings say, and compare it with held-out data.

    Raises:
        DataError: if a file or checkpoint cannot be used.
        UsageError: if the output folder holds another run.
        NoPlanFitsError: if no plan keeps training inside the budget.
        MemfitError: if training diverges; no final model is written then.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint in place.
    """
    # TF32 would round the products of factors to ten bits; score matching takes differences.
    torch.backends.cuda.matmul.allow_tf32 = False
    with JoinedRanks(settings.memory_settings.device) as ranks:
        training = _prepared(settings, ranks, console)
        loop = _begun(training)
        loop.fit()
        result = _finished(training, loop) if ranks.is_first else {}
        ranks.wait()
    return result


def _prepared(settings: TrainingSettings, ranks: Ranks, console: Console) -> _Training:
    """Load the data and find the plan."""
    parts = DataSizes(
        num_train=settings.num_train,
        num_validation=settings.num_validation,
        num_test=settings.num_test,
    )
    samples = load_samples(settings.data, parts, seed=settings.seed, folder=settings.data_dir)
    sizes = sizes_for(settings, samples.num_dimensions)
    centres = samples.train[: sizes.num_centres].clone()
    own = ranks.own(centres)
    job = build_job(settings, sizes, own, samples, ranks.num_ranks)
    with console.status("planning: recording steps, nothing is run yet"):
        planned_memory = plan_training(job, settings, len(own))
    if ranks.is_first:
        estimate = MemoryEstimate.of(planned_memory.plain, sizes, len(own))
        console.print("\n".join(estimate.lines()), markup=False)
        show_plan(planned_memory, console)
    return _Training(
        settings=settings,
        samples=samples,
        centres=centres,
        planned_memory=planned_memory,
        folder=RunFolder(root=settings.folder, checkpoints=settings.folder),
        ranks=ranks,
        console=console,
    )


def _begun(training: _Training) -> TrainingLoop:
    """Build the run, alone or with the other ranks, and take up where a checkpoint left off."""
    import memfit

    settings, folder, planned_memory = training.settings, training.folder, training.planned_memory
    found = _checkpoint_to_resume(training) if settings.resume else None
    if training.ranks.is_first:
        _begin_folder(training, is_new=found is None)
    run = memfit.start(planned_memory.job, planned_memory.plan, device=planned_memory.run_device)
    mixture = run.model
    assert isinstance(mixture, KernelMixture), "the job's model() gives a KernelMixture"
    mixture.group = training.ranks.group
    training.ranks.same(list(mixture.parameters()))
    loop = TrainingLoop(
        run,
        training.samples,
        settings,
        evaluation_chunk=training.evaluation_chunk,
        folder=folder,
        ranks=training.ranks,
        console=training.console,
    )
    if found is not None:
        loop.resume(found)
    return loop


def _checkpoint_to_resume(training: _Training) -> dict[str, Any]:
    """Read the latest checkpoint, if it belongs to this run."""
    settings, path = training.settings, training.folder.latest_checkpoint
    content = load_checkpoint(path)
    sizes = sizes_for(settings, training.samples.num_dimensions)
    check_belongs(content, path, {**sizes.to_json(), **identity(settings)})
    if training.ranks.is_first:
        training.console.print(f"Resuming from {path}: {content['step']} steps done.")
    return content


def _begin_folder(training: _Training, *, is_new: bool) -> None:
    """Make the folder ready, and write what is known before the first step."""
    folder, settings, planned_memory = training.folder, training.settings, training.planned_memory
    if is_new:
        folder.begin(overwrite=settings.overwrite)
    else:
        folder.resume()
    sizes = sizes_for(settings, training.samples.num_dimensions)
    folder.write_json(
        "config.json",
        {
            "training": settings.to_json(),
            "model": sizes.to_json(),
            "num_ranks": training.ranks.num_ranks,
            "strategies": list(planned_memory.plan.labels()),
            "numerics": str(planned_memory.planned.numerics),
            "budget_bytes": planned_memory.budget_bytes,
            "plain_peak_bytes": planned_memory.plain.peak_allocated_bytes,
            "predicted_peak_bytes": planned_memory.planned.peak_allocated_bytes,
        },
    )
    planned_memory.plan.save(folder.root / "plan.yaml")
    save_checkpoint(folder.centres, training.centres)  # type: ignore[arg-type]  # a bare tensor, as the document has it


def _finished(training: _Training, loop: TrainingLoop) -> dict[str, Any]:
    """Write the final model, compare the best one with held-out data, and report."""
    folder, settings = training.folder, training.settings
    mixture = _whole_mixture(training, loop)
    save_checkpoint(folder.final_model, mixture.network.state_dict())
    if loop.state.best_step is not None:
        mixture.network.load_state_dict(load_weights(folder.best_model))
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = draw(mixture, settings.num_generated, generator, chunk=training.evaluation_chunk)
    metrics = _metrics(training, mixture, loop, drawn, generator)
    planned_memory = training.planned_memory
    result = {
        "workload": "wpo-sgm",
        "metrics": metrics,
        "num_steps": loop.state.step,
        "best_step": loop.state.best_step,
        "num_ranks": training.ranks.num_ranks,
        "plain_peak_bytes": planned_memory.plain.peak_allocated_bytes,
        "predicted_peak_bytes": planned_memory.planned.peak_allocated_bytes,
        "measured_peak_bytes": loop.run.measured_peak_bytes,
        "budget_bytes": planned_memory.budget_bytes,
        "strategies": list(planned_memory.plan.labels()),
        "numerics": str(planned_memory.planned.numerics),
        "run_folder": str(folder.root),
    }
    pictures = _pictures(training, mixture, drawn)
    for name, content in pictures.items():
        folder.write(name, content)
    _report(training, loop, metrics, pictures)
    folder.write_json("result.json", result)
    _say(training, loop, metrics)
    return result


def _whole_mixture(training: _Training, loop: TrainingLoop) -> KernelMixture:
    """Give the trained mixture with the centres of all ranks."""
    trained = loop.mixture
    loop.run.close()
    trained.group = None
    if training.ranks.group is None:
        return trained
    whole = KernelMixture(trained.sizes, training.centres.to(trained.centres))
    whole.network = trained.network
    return whole.to(trained.centres.device)


def _metrics(
    training: _Training,
    mixture: KernelMixture,
    loop: TrainingLoop,
    drawn: Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Compare the mixture with held-out data, and with two simple densities."""
    samples = training.samples
    metrics = {
        "loss": loop.state.history[-1]["loss"],
        "valid_nll": loop.state.best_nll if loop.state.best_nll is not None else math.nan,
        "test_nll": negative_log_likelihood(mixture, samples.test, chunk=training.evaluation_chunk),
        "gaussian_test_nll": gaussian_negative_log_likelihood(samples.train, samples.test),
        "density_estimate_test_nll": density_estimate(
            samples.train, samples.validation, samples.test
        )["nll"],
        **compare(drawn, samples.test, samples.train, generator),
    }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _pictures(training: _Training, mixture: KernelMixture, drawn: Tensor) -> dict[str, bytes]:
    """Draw the pictures by file name, where matplotlib is installed."""
    samples = training.samples

    @torch.no_grad()
    def log_density(points: Tensor) -> Tensor:
        points = points.to(mixture.centres.device)
        return mixture.log_density(points, chunk=training.evaluation_chunk).cpu()

    try:
        pictures = {"samples.png": sample_picture(samples, drawn)}
        if samples.num_dimensions == 2:
            pictures["density.png"] = density_picture(samples, training.centres, log_density)
        if samples.picture_shape is not None:
            pictures["nearest.png"] = nearest_picture(samples, drawn)
    except MissingExtraError as error:
        training.console.print(f"No pictures: {error}", soft_wrap=True)
        return {}
    return pictures


def _report(
    training: _Training, loop: TrainingLoop, metrics: dict[str, Any], pictures: dict[str, bytes]
) -> None:
    """Measure one step and write report.html."""
    import memfit
    from memfit.reports.contents import RunReport

    planned_memory = training.planned_memory
    report = RunReport(
        title="WPO-SGM",
        job="wpo-sgm",
        device=planned_memory.planned.device,
        budget_bytes=planned_memory.budget_bytes,
        plain=planned_memory.plain,
        planned=planned_memory.planned,
        measured=memfit.measure(
            planned_memory.job, planned_memory.plan, device=planned_memory.run_device
        ),
        rows=planned_memory.plan.considered,
        metrics=loop.state.history,
        results=metrics,
        command=training.settings.command,
        pictures=[(name.removesuffix(".png"), content) for name, content in pictures.items()],
    )
    write_report_if_possible(training.folder.root, report, training.console)


def _say(training: _Training, loop: TrainingLoop, metrics: dict[str, Any]) -> None:
    """Print what came out, and write it to training.log."""
    nlls = ", ".join(
        f"{what} {_shown(metrics[name])}"
        for what, name in (
            ("test NLL", "test_nll"),
            ("of one Gaussian", "gaussian_test_nll"),
            ("of a kernel density estimate", "density_estimate_test_nll"),
        )
    )
    distances = (
        f"drawn samples against test data: squared MMD {_shown(metrics['mmd_squared'])}, sliced "
        f"Wasserstein {_shown(metrics['sliced_wasserstein'])}, distance to training data "
        f"{_shown(metrics['distance_ratio'])} times that of test data"
    )
    peaks = peaks_line(training.planned_memory, loop.run.measured_peak_bytes)
    where = (
        f"run folder: {training.folder.root} (report.html, samples.png, plan.yaml, loss_log.csv)"
    )
    lines = [nlls, distances, peaks, where]
    training.console.print("\n".join(lines), markup=False, soft_wrap=True)
    history = "\n".join(json.dumps(line) for line in loop.state.history)
    training.folder.write("training.log", "\n".join([history, *lines]) + "\n")


def _shown(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"
