"""What ``memfit train naics`` does: the stages of a run, evaluation, and the files."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfit.errors import MissingExtraError
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import write_run_page
from memfit.reports.training import Training, write_training
from memfit_workloads.checkpoint_files import save_checkpoint
from memfit_workloads.memory_settings import plain_values
from memfit_workloads.planned_memory import PlannedFigures, peaks_line, planning, show_plan
from memfit_workloads.run_files import RunFiles

from .inputs import Inputs, centre_of, read_inputs
from .sampling import Stage
from .settings import NaicsSettings

if TYPE_CHECKING:
    from rich.console import Console

    from .checkpoints import Reached
    from .data_module import NaicsData
    from .module import NaicsContrastive

FINAL, RESULTS, EMBEDDINGS = "final_model.pt", "results.json", "embeddings.npz"
_PACKAGES = ("lightning", "peft", "transformers", "sklearn", "scipy", "tokenizers")
CHUNK = 64


@dataclass(slots=True)
class _Run:
    """What a run has while it trains."""

    settings: NaicsSettings
    console: Console
    inputs: Inputs
    module: NaicsContrastive
    files: RunFiles
    started_seconds: float
    first_weights: dict[str, torch.Tensor]
    """Of what learns."""


def train(settings: NaicsSettings, console: Console) -> dict[str, Any]:
    """Train through all stages, evaluate on held-out codes; return what ``--json`` ends with.

    Raises:
        MissingExtraError: without a package that is needed.
        UsageError: if the output folder holds another run, or none to go on with.
        NoPlanFitsError: if no plan keeps an update inside the budget.
        MemfitError: if training diverges; no final model is written then.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint in place.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("memfit train naics", package, "naics")
    from .training import plan_training

    started = time.monotonic()
    run = _begin(settings, console, started)
    reached = _read_reached(run) if settings.resume else None
    largest = max(settings.stages, key=lambda stage: stage.n_negatives)
    with planning(console):
        data = _data(run, largest)
        planned = plan_training(settings, lambda: run.module, data)
    show_plan(planned, console)
    _begin_folder(run, planned)
    reached = reached or _untouched(run)
    try:
        reached = _train_stages(run, planned, reached)
    except KeyboardInterrupt:
        _say_how_to_continue(run)
        raise
    return _finish(run, planned, reached)


def _read_reached(run: _Run) -> Reached:
    """Return how far the run in the folder has come, and give the module its weights."""
    from .checkpoints import LAST, read_reached

    return read_reached(run.files.checkpoints / LAST, run.settings, run.module)


def _untouched(run: _Run) -> Reached:
    """Return where a run begins, with what is reached without training."""
    from .checkpoints import Reached, identity_of

    _centre(run)
    before = _untrained(run) if run.settings.has_baselines else {}
    return Reached(run=identity_of(run.settings), baselines=before)


def _train_stages(run: _Run, planned: PlannedFigures, reached: Reached) -> Reached:
    """Train through the stages that are left, and return what came of all."""
    from .building import optimizer_settings
    from .checkpoints import LAST, Reached, save_between
    from .training import fit

    names = run.settings.stage_names
    for number in range(reached.stage, len(names)):
        name, stage = names[number], run.settings.stages[number]
        folder = run.files.root if number == 0 else run.files.root / name
        run.module.optimizer_settings = optimizer_settings(run.settings, stage)
        trained = fit(
            run.settings, run.module, _data(run, stage), planned, reached=reached, folder=folder
        )
        stages = {**reached.stages, name: asdict(trained)}
        reached = Reached(
            run=reached.run, stage=number + 1, stages=stages, baselines=reached.baselines
        )
        save_between(run.files.checkpoints / LAST, run.module, reached)
        validation = _evaluated(run, run.inputs.validation)
        run.console.print(
            f"{name}: {trained.num_steps} steps, validation cophenetic "
            f"{validation['cophenetic']:.3f}, NDCG@5 {validation['ndcg_5']:.3f}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    return reached


def _say_how_to_continue(run: _Run) -> None:
    """Say where a run that was interrupted is, where there is anything to go on with."""
    from .checkpoints import LAST

    path = run.files.checkpoints / LAST
    if path.is_file():
        command = run.settings.command.replace(" --overwrite", "").replace(" --resume", "")
        run.console.print(
            f"Interrupted. Saved as {path}. Continue there with:\n{command} --resume",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _begin(settings: NaicsSettings, console: Console, started: float) -> _Run:
    from .building import module_of

    torch.manual_seed(settings.of("seed"))
    module = module_of(settings)
    root = settings.output_dir
    files = RunFiles(
        root=root,
        checkpoints=root / "checkpoints",
        own=(FINAL, RESULTS, EMBEDDINGS),
        final=(FINAL, RESULTS),
        resume_flag="--resume",
    )
    first = {
        name: weight.detach().clone()
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return _Run(settings, console, read_inputs(settings), module, files, started, first)


def _data(run: _Run, stage: Stage) -> NaicsData:
    from .building import data_of

    return data_of(run.settings, run.inputs, stage)


def _begin_folder(run: _Run, planned: PlannedFigures) -> None:
    """Make the folder ready, and write what is known before the first step."""
    if run.settings.resume:
        run.files.resume()
    else:
        run.files.begin(overwrite=run.settings.overwrite)
    told = {
        "settings": plain_values(run.settings.config),
        "stages": [plain_values(stage) for stage in run.settings.stages],
        "num_codes": {
            "train": len(run.inputs.train),
            "validation": len(run.inputs.validation),
            "test": len(run.inputs.test),
        },
        **planned.to_json(),
    }
    run.files.write_json("config.json", told)
    planned.plan.save(run.files.root / "plan.yaml")


def _centre(run: _Run) -> None:
    """Take away the mean of the training texts, where experts begin as the encoder."""
    if not run.module.sizes.residual:
        return
    encoders = run.module.embedder.encoders
    encoders.eval()
    encoders.centre.copy_(centre_of(encoders, run.inputs, CHUNK))
    run.module.train()


@torch.no_grad()
def embed(module: NaicsContrastive, inputs: Inputs, rows: list[int]) -> torch.Tensor:
    """Return the points of some codes, from their texts alone, in double precision."""
    was_training = module.training
    module.eval().cpu()
    parts = torch.tensor(rows).split(CHUNK)
    points = [module(inputs.tokens(part.tolist())).points for part in parts]
    module.train(was_training)
    return torch.cat(points).double()


def _evaluated(run: _Run, rows: list[int]) -> dict[str, Any]:
    """Return all metrics of some codes."""
    from .evaluation import retrieval_metrics, spread_metrics, tree_metrics
    from .lorentz import pair_distances, radii, violation

    curvature = run.module.sizes.curvature
    points = embed(run.module, run.inputs, rows)
    distances = pair_distances(points, points, curvature).fill_diagonal_(0.0).numpy()
    tree = run.inputs.tree
    lengths = radii(points, curvature)
    return {
        **tree_metrics(distances, run.inputs.distances(rows)),
        **retrieval_metrics(distances, tree.paths[rows], tree.levels[rows]),
        **spread_metrics(points.numpy(), distances),
        "lorentz_violation": violation(points, curvature),
        "radius_mean": float(lengths.mean()),
        "radius_std": float(lengths.std()),
    }


def _finish(run: _Run, planned: PlannedFigures, reached: Reached) -> dict[str, Any]:
    """Keep what is to be kept, evaluate, write, and say what came of it."""
    _keep_part(run)
    rows = run.inputs.test
    metrics = _evaluated(run, rows)
    validation = _evaluated(run, run.inputs.validation)
    peaks = [each["measured_peak_bytes"] or 0 for each in reached.stages.values()]
    result = {
        "workload": "naics",
        "metrics": metrics,
        "validation": validation,
        "baselines": dict(reached.baselines),
        "encoder": run.module.sizes.encoder.base,
        "num_codes": {"train": len(run.inputs.train), "test": len(rows)},
        "stages": {
            name: each["metrics"] | {"num_steps": each["num_steps"]}
            for name, each in reached.stages.items()
        },
        **planned.to_json(),
        "measured_peak_bytes": max(peaks) or None,
        "seconds": round(time.monotonic() - run.started_seconds, 1),
        "run_folder": str(run.files.root),
    }
    _write(run, result)
    _report(run, planned, result)
    scores = (
        f"{len(rows)} held-out codes: cophenetic {metrics['cophenetic']:.3f}, NDCG@5 "
        f"{metrics['ndcg_5']:.3f}, Lorentz violation {metrics['lorentz_violation']:.1e}"
    )
    lines = [
        scores,
        *(
            f"  {name}: cophenetic {each['cophenetic']:.3f}, NDCG@5 {each['ndcg_5']:.3f}"
            for name, each in result["baselines"].items()
        ),
        peaks_line(planned, result["measured_peak_bytes"]),
        f"run folder: {run.files.root} ({FINAL}, {RESULTS}, plan.yaml)",
    ]
    run.console.print("\n".join(lines), markup=False, soft_wrap=True)
    return result


@torch.no_grad()
def _keep_part(run: _Run) -> None:
    """Go back from the learned weights towards the first ones, as far as the settings say.

    Source: Wortsman et al. 2022, https://arxiv.org/abs/2109.01903.
    """
    fraction = float(run.settings.of("training.learned_fraction"))
    for name, first in run.first_weights.items():
        learned = run.module.get_parameter(name)
        learned.copy_(first.to(learned).lerp(learned, fraction))


def _untrained(run: _Run) -> dict[str, Any]:
    """Return what is reached on the held-out codes without training."""
    from .baselines import encoder_baselines, text_baselines

    rows, encoders = run.inputs.test, run.module.embedder.encoders
    tree = run.inputs.distances(rows)
    found = {
        **text_baselines([run.inputs.texts[row] for row in rows], tree),
        **encoder_baselines(encoders, run.inputs.tokens(rows), tree, CHUNK),
        "this model before training": _evaluated(run, rows),
    }
    run.module.train()
    return found


def _write(run: _Run, result: dict[str, Any]) -> None:
    """Write the model, the points of all codes, and the results."""
    from .checkpoints import learned_state

    module, inputs = run.module, run.inputs
    save_checkpoint(
        run.files.root / FINAL,
        {"learned": learned_state(module), "model_config": plain_values(module.sizes)},
    )
    points = (
        embed(module, inputs, list(range(len(inputs.tree)))) if not run.settings.is_demo else None
    )
    if points is not None:
        np.savez(
            run.files.root / EMBEDDINGS, codes=np.array(inputs.tree.codes), points=points.numpy()
        )
    run.files.write_json(RESULTS, result)


def _report(run: _Run, planned: PlannedFigures, result: dict[str, Any]) -> None:
    """Write training.json, and report.html where that can be drawn."""
    training = Training(
        title="NAICS",
        command=run.settings.command,
        budget_bytes=planned.budget_bytes,
        plain=planned.plain,
        planned=planned.planned,
        considered=planned.considered,
        run_peak_bytes=result["measured_peak_bytes"],
        results=dict(result["metrics"]),
    )
    write_training(run.files.root, training)
    try:
        write_run_page(read_report(run.files.root))
    except MissingExtraError as error:
        run.console.print(f"No report.html: {error}", markup=False, soft_wrap=True)
