"""What a run leaves behind: the model, figures against held-out data, pictures and a report."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from memfit.errors import MissingExtraError
from memfit_workloads.checkpoint_files import save_checkpoint
from memfit_workloads.planned_memory import peaks_line, write_report_if_possible

from .checkpoints import load_weights
from .evaluation import (
    compare,
    density_estimate,
    gaussian_negative_log_likelihood,
    negative_log_likelihood,
)
from .loop import TrainingLoop
from .model import KernelMixture
from .pictures import density_picture, nearest_picture, sample_picture
from .sampling import draw
from .training import Training


def finished(training: Training, loop: TrainingLoop) -> dict[str, Any]:
    """Write the final model, compare the best one with held-out data, and report."""
    folder, settings = training.folder, training.settings
    mixture = _whole_mixture(training, loop)
    save_checkpoint(folder.final_model, mixture.network.state_dict())
    if loop.state.best_step is not None:
        mixture.network.load_state_dict(load_weights(folder.best_model))
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = draw(mixture, settings.num_generated, generator, chunk=training.evaluation_chunk)
    drawn = training.unwhitened(drawn)
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


def _whole_mixture(training: Training, loop: TrainingLoop) -> KernelMixture:
    """Return the trained mixture with the centres of all ranks."""
    trained = loop.mixture
    loop.run.close()
    trained.group = None
    if training.ranks.group is None:
        return trained
    whole = KernelMixture(trained.sizes, training.centres.to(trained.centres))
    whole.network = trained.network
    return whole.to(trained.centres.device)


def _metrics(
    training: Training,
    mixture: KernelMixture,
    loop: TrainingLoop,
    drawn: Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Compare the mixture with held-out data, and with two simple densities."""
    data, samples = training.data, training.samples
    test_nll = negative_log_likelihood(mixture, samples.test, chunk=training.evaluation_chunk)
    metrics = {
        "loss": loop.state.history[-1]["loss"],
        "valid_nll": loop.state.best_nll if loop.state.best_nll is not None else math.nan,
        "test_nll": test_nll - samples.log_volume,
        "gaussian_test_nll": gaussian_negative_log_likelihood(data.train, data.test),
        "density_estimate_test_nll": density_estimate(data.train, data.validation, data.test)[
            "nll"
        ],
        **compare(drawn, data.test, data.train, generator),
    }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _pictures(training: Training, mixture: KernelMixture, drawn: Tensor) -> dict[str, bytes]:
    """Draw the pictures by file name, where matplotlib is installed."""
    data = training.data

    @torch.no_grad()
    def log_density(points: Tensor) -> Tensor:
        points = training.whitened(points).to(mixture.centres.device)
        found = mixture.log_density(points, chunk=training.evaluation_chunk).cpu()
        return found + training.samples.log_volume

    try:
        pictures = {"samples.png": sample_picture(data, drawn)}
        if data.num_dimensions == 2:
            centres = training.unwhitened(training.centres)
            pictures["density.png"] = density_picture(data, centres, log_density)
        if data.picture_shape is not None:
            pictures["nearest.png"] = nearest_picture(data, drawn)
    except MissingExtraError as error:
        training.console.print(f"No pictures: {error}", soft_wrap=True)
        return {}
    return pictures


def _report(
    training: Training, loop: TrainingLoop, metrics: dict[str, Any], pictures: dict[str, bytes]
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
        rows=planned_memory.considered,
        metrics=loop.state.history,
        results=metrics,
        command=training.settings.command,
        run_peak_bytes=loop.run.measured_peak_bytes,
        pictures=[(name.removesuffix(".png"), content) for name, content in pictures.items()],
    )
    write_report_if_possible(training.folder.root, report, training.console)


def _say(training: Training, loop: TrainingLoop, metrics: dict[str, Any]) -> None:
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
