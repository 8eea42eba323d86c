"""``memfit train wpo-sgm``: from flags to a trained mixture inside a memory budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from memfit_workloads.checkpoint_files import save_checkpoint
from memfit_workloads.planned_memory import show_plan
from memfit_workloads.started_run import started_run

from .centres import choose_centres
from .checkpoints import check_belongs, load_checkpoint
from .data import DataSizes, load_samples
from .finish import finished
from .job import build_job, sizes_for
from .loop import TrainingLoop, identity
from .memory_estimate import MemoryEstimate
from .memory_plan import plan_training
from .model import KernelMixture
from .ranks import JoinedRanks, Ranks
from .run_folder import RunFolder
from .settings import TrainingSettings
from .training import Training
from .whitening import Whitening

if TYPE_CHECKING:
    from rich.console import Console


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
        with loop.run:
            loop.fit()
            result = finished(training, loop) if ranks.is_first else {}
            ranks.wait()
    return result


def _prepared(settings: TrainingSettings, ranks: Ranks, console: Console) -> Training:
    """Load the data and find the plan."""
    told = settings.data
    parts = DataSizes(
        num_train=told.num_train, num_validation=told.num_validation, num_test=told.num_test
    )
    data = load_samples(told.name, parts, seed=settings.seed, folder=told.folder)
    whitening = Whitening.of(data.train) if told.whiten else None
    samples = data if whitening is None else whitening.samples(data)
    sizes = sizes_for(settings, samples.num_dimensions)
    centres = choose_centres(samples.train, sizes.num_centres, told.centre_choice, settings.seed)
    own = ranks.own(centres)
    job = build_job(settings, sizes, own, samples, ranks.num_ranks)
    with console.status("planning: recording steps, nothing is run yet"):
        planned_memory = plan_training(job, settings, len(own))
    if ranks.is_first:
        estimate = MemoryEstimate.of(planned_memory.plain, sizes, len(own))
        console.print("\n".join(estimate.lines()), markup=False)
        show_plan(planned_memory, console)
    return Training(
        settings=settings,
        data=data,
        whitening=whitening,
        samples=samples,
        centres=centres,
        planned_memory=planned_memory,
        folder=RunFolder(root=settings.folder, checkpoints=settings.folder),
        ranks=ranks,
        console=console,
    )


def _begun(training: Training) -> TrainingLoop:
    """Build the run, alone or with the other ranks, and take up where a checkpoint left off."""
    settings, folder, planned_memory = training.settings, training.folder, training.planned_memory
    found = _checkpoint_to_resume(training) if settings.resume else None
    if training.ranks.is_first:
        _begin_folder(training, is_new=found is None)
    run = started_run(planned_memory.job, planned_memory, settings.folder, training.console)
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


def _checkpoint_to_resume(training: Training) -> dict[str, Any]:
    """Read the latest checkpoint, if it belongs to this run."""
    settings, path = training.settings, training.folder.latest_checkpoint
    content = load_checkpoint(path)
    sizes = sizes_for(settings, training.samples.num_dimensions)
    check_belongs(content, path, {**sizes.to_json(), **identity(settings)})
    if training.ranks.is_first:
        training.console.print(f"Resuming from {path}: {content['step']} steps done.")
    return content


def _begin_folder(training: Training, *, is_new: bool) -> None:
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
    if training.whitening is not None:
        save_checkpoint(folder.whitening, asdict(training.whitening))
    save_checkpoint(folder.centres, training.centres)  # type: ignore[arg-type]  # a bare tensor, as the document has it
