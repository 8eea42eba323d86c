"""``memfit train conve``: from flags to a trained, ranked model inside a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit_workloads.checkpoint_files import INTERRUPTED, FoundCheckpoint, save_checkpoint
from memfit_workloads.planned_memory import (
    PlannedMemory,
    peaks_line,
    plan_memory,
    show_plan,
    write_report_if_possible,
)
from memfit_workloads.started_run import started_run

from .checkpoints import check_belongs, load_checkpoint, newest_checkpoint
from .data import Graph, read_graph
from .evaluation import Evaluation
from .job import build_job, sizes_for, training_queries
from .loop import TrainingLoop
from .run_folder import RunFolder, config_json
from .settings import TrainingSettings
from .sizes import ConvESizes

if TYPE_CHECKING:
    from rich.console import Console


def train(settings: TrainingSettings, console: Console) -> dict[str, Any]:
    """Train ConvE as the settings say, and rank the test triples with the best weights.

    Raises:
        DataError: if a file or checkpoint cannot be used.
        UsageError: if the output folder holds another run.
        NoPlanFitsError: if no plan keeps training inside the budget.
        MemfitError: if training diverges; no final model is written then.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint in place.
    """
    graph = read_graph(settings.files, skip_bad_lines=settings.skip_bad_lines)
    if graph.num_bad_lines:
        console.print(f"Left out {graph.num_bad_lines} lines that could not be used.")
    sizes = sizes_for(settings, graph)
    queries = training_queries(settings, graph)
    job = build_job(settings, sizes, queries)
    found = _checkpoint_to_resume(settings, console)
    if found is not None:
        check_belongs(found, sizes, len(queries), settings.batch_size)
    with console.status("planning: recording steps, nothing is run yet"):
        planned_memory = plan_memory(job, settings.memory_settings)
    show_plan(planned_memory, console)
    folder = RunFolder(root=settings.output_dir, checkpoints=settings.checkpoint_dir)
    if found is None:
        folder.begin(overwrite=settings.overwrite)
    else:
        folder.resume()
    folder.write_json("config.json", config_json(settings, sizes, graph, planned_memory))
    folder.write_names(graph)
    planned_memory.plan.save(folder.root / "plan.yaml")
    loop = TrainingLoop(
        started_run(job, planned_memory, folder.root, console),
        queries,
        Evaluation.of(graph, sizes, _free_bytes(planned_memory, sizes)),
        settings,
        sizes=sizes,
        folder=folder,
        console=console,
    )
    if found is not None:
        loop.resume(found.content)
    with loop.run:
        loop.fit()
        return _finish(loop, graph, folder, planned_memory, settings=settings, console=console)


def _checkpoint_to_resume(settings: TrainingSettings, console: Console) -> FoundCheckpoint | None:
    """Find the checkpoint that ``--resume-from-checkpoint`` asks for."""
    if settings.resume is None:
        return None
    if settings.resume == "auto":
        found = newest_checkpoint(settings.checkpoint_dir)
    else:
        path = Path(settings.resume)
        found = FoundCheckpoint(path, load_checkpoint(path), [])
    for reason in found.unreadable:
        console.print(f"Passed over {reason}", soft_wrap=True)
    epoch, steps = found.content["epoch"], found.content.get("steps_done", 0)
    further = f" and {steps} steps" if steps else ""
    console.print(f"Resuming from {found.path}: {epoch} epochs{further} done.", soft_wrap=True)
    return found


def _free_bytes(planned_memory: PlannedMemory, sizes: ConvESizes) -> int | None:
    """Return what a budget leaves for evaluation beside weights and optimizer states."""
    if planned_memory.budget_bytes is None:
        return None
    parts = ("parameters", "buffers", "optimizer state")
    held = sum(planned_memory.planned.by_category.get(part, 0) for part in parts)
    # One row of scores has to fit in any case.
    return max(planned_memory.budget_bytes - held, 10 * sizes.num_entities)


def _finish(
    loop: TrainingLoop,
    graph: Graph,
    folder: RunFolder,
    planned_memory: PlannedMemory,
    *,
    settings: TrainingSettings,
    console: Console,
) -> dict[str, Any]:
    """Write the final model, rank the test triples with the best weights, and report."""
    save_checkpoint(folder.final_model, loop.checkpoint())
    (folder.checkpoints / INTERRUPTED).unlink(missing_ok=True)
    test = _rank_test(loop, graph, folder)
    folder.write_json("test_results.json", test)
    last = loop.state.history[-1]
    both = test["both"]
    metrics = {
        "loss": last["loss"],
        "valid_mrr": loop.state.best_mrr,
        **{f"test_{name}": value for name, value in both.items()},
    }
    console.print(
        f"test ({test['model']}, epoch {test['epoch']}): MRR {both['mrr']:.4f}, "
        f"hits@1 {both['hits_at_1']:.3f}, hits@10 {both['hits_at_10']:.3f}"
    )
    result = {
        "workload": "conve",
        "metrics": metrics,
        "test": test,
        "num_epochs": loop.state.epoch,
        "best_epoch": loop.state.best_epoch,
        "num_bad_lines": graph.num_bad_lines,
        "plain_peak_bytes": planned_memory.plain.peak_allocated_bytes,
        "predicted_peak_bytes": planned_memory.planned.peak_allocated_bytes,
        "measured_peak_bytes": loop.run.measured_peak_bytes,
        "budget_bytes": planned_memory.budget_bytes,
        "strategies": list(planned_memory.plan.labels()),
        "numerics": str(planned_memory.planned.numerics),
        "run_folder": str(folder.root),
    }
    _write_report(folder.root, planned_memory, settings, loop, metrics, console=console)
    peaks = peaks_line(planned_memory, loop.run.measured_peak_bytes)
    where = f"run folder: {folder.root} (report.html, plan.yaml, metrics.jsonl, best_model.pt)"
    console.print(f"{peaks}\n{where}", markup=False, soft_wrap=True)
    return result


def _rank_test(loop: TrainingLoop, graph: Graph, folder: RunFolder) -> dict[str, Any]:
    """Rank the test triples with the weights of the best validation, chosen without the test."""
    model: Any = loop.run.model
    name, epoch = folder.final_model.name, loop.state.epoch
    if loop.state.best_epoch is not None and folder.best_model.is_file():
        best = load_checkpoint(folder.best_model)
        loop.run.close()  # weights are loaded into the model as the job built it
        model.load_state_dict(best["model_state_dict"])
        name, epoch = folder.best_model.name, best["epoch"]
    return {"model": name, "epoch": epoch, **loop.evaluation.metrics(model, graph.test)}


def _write_report(
    folder: Path,
    planned_memory: PlannedMemory,
    settings: TrainingSettings,
    loop: TrainingLoop,
    metrics: dict[str, Any],
    *,
    console: Console,
) -> None:
    """Measure one step and write report.html, where the packages for it are installed."""
    import memfit
    from memfit.reports.contents import RunReport

    report = RunReport(
        title="ConvE",
        job="conve",
        device=planned_memory.planned.device,
        budget_bytes=planned_memory.budget_bytes,
        plain=planned_memory.plain,
        planned=planned_memory.planned,
        measured=memfit.measure(
            planned_memory.job, planned_memory.plan, device=planned_memory.run_device
        ),
        rows=planned_memory.considered,
        metrics=[{k: v for k, v in epoch.items() if k != "valid"} for epoch in loop.state.history],
        results=metrics,
        command=settings.command,
        run_peak_bytes=loop.run.measured_peak_bytes,
    )
    write_report_if_possible(folder, report, console)
