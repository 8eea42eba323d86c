"""The document's remedies, one flag each: what it claims, what is predicted, what is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.units import format_bytes

from .arguments import add_arguments, settings_of
from .batches import FinetuningDataset
from .data_module import DreamsData, rows_of
from .inputs import Labelled, loader_settings
from .ms_data import MSData
from .objectives import objective_named
from .remedy_list import REMEDIES, SIZES, Remedy
from .runs import finetuning_builder
from .settings import DATASETS, DreamsSettings
from .training import fit, given_plan

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENT, CPU = "document", "cpu"
_NUM_SPECTRA = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyFigures:
    """What became of one remedy."""

    name: str
    flag: str
    claim: str
    effect: str
    document_predicted_bytes: int
    cpu_predicted_bytes: int
    cpu_measured_bytes: int | None
    document_saved_fraction: float
    cpu_saved_fraction: float | None


def show_remedies(console: Console) -> dict[str, Any]:
    """Predict and measure every remedy, print the table, and return it for ``--json``."""
    rows = remedy_figures(console)
    console.print(markdown(rows), markup=False, soft_wrap=True, highlight=False)
    worst = max(
        abs(row.cpu_predicted_bytes / row.cpu_measured_bytes - 1)
        for row in rows
        if row.cpu_measured_bytes
    )
    return {
        "workload": "dreams",
        "regime": "remedies",
        "metrics": {"num_remedies": len(rows) - 1, "largest_prediction_error": round(worst, 4)},
        "remedies": [asdict(row) for row in rows],
    }


def remedy_figures(console: Console, remedies: Sequence[Remedy] = REMEDIES) -> list[RemedyFigures]:
    """Predict and measure remedies; the first is the document's starting point.

    What leaves the step as it is is predicted once, and measured each time.
    """
    predicted: dict[Any, int] = {}
    rows: list[RemedyFigures] = []
    plain: tuple[int, int | None] | None = None
    for remedy in remedies:
        console.print(f"{remedy.name} ...", markup=False)
        in_document, _ = _figures(remedy, DOCUMENT, predicted, is_measured=False)
        on_cpu, measured = _figures(remedy, CPU, predicted, is_measured=remedy.is_measurable)
        plain = plain or (in_document, measured)
        saved = None if measured is None or not plain[1] else 1 - measured / plain[1]
        rows.append(
            RemedyFigures(
                name=remedy.name,
                flag=remedy.flag,
                claim=remedy.claim,
                effect=remedy.effect,
                document_predicted_bytes=in_document,
                cpu_predicted_bytes=on_cpu,
                cpu_measured_bytes=measured,
                document_saved_fraction=round(1 - in_document / plain[0], 4),
                cpu_saved_fraction=None if saved is None else round(saved, 4),
            )
        )
    return rows


def _figures(
    remedy: Remedy, where: str, predicted: dict[Any, int], *, is_measured: bool
) -> tuple[int, int | None]:
    """Return predicted and measured peak of a remedy at one of the two sizes."""
    settings = remedy_settings(remedy, where)
    step = _step_of(settings)
    if not is_measured and step in predicted:
        return predicted[step], None
    data, given = _made_up(settings)
    build = finetuning_builder(settings, given, [0])
    planned = given_plan(settings, build, data)
    predicted[step] = planned.planned.peak_allocated_bytes
    if not is_measured:
        return predicted[step], None
    torch.manual_seed(settings.seed)
    trained = fit(settings, build(), data, planned, folder=None)
    return predicted[step], trained.measured_peak_bytes


def remedy_settings(remedy: Remedy, where: str) -> DreamsSettings:
    """Return the settings of a remedy: those of the document's run, and its flag."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [*SIZES[where], *remedy.words[where]]
    settings = settings_of(parser.parse_args(words), " ".join(words))
    return replace(settings, max_epochs=1, num_devices=1, limit_val_batches=1.0)


def _step_of(settings: DreamsSettings) -> tuple[Any, ...]:
    """Return what a step's peak depends on."""
    return (
        settings.sizes,
        settings.batch_size,
        settings.accumulate_grad_batches,
        settings.max_peaks_n,
        settings.train_precision,
        settings.frozen_layers,
        settings.memory_settings.require,
    )


def _made_up(settings: DreamsSettings) -> tuple[DreamsData, Labelled]:
    """Return real spectra with made-up fingerprints: no chemistry is needed for bytes."""
    objective = objective_named(settings.train_objective, settings.sizes.d_model)
    generator = torch.Generator().manual_seed(0)
    bits = torch.rand(_NUM_SPECTRA, objective.num_outputs, generator=generator) < 0.5
    labels = bits.to(torch.float32)
    rows = list(range(_NUM_SPECTRA))
    spectra = rows_of(MSData(DATASETS["pesticides"]), rows, settings.max_peaks_n)
    data = DreamsData(FinetuningDataset(spectra, labels), None, loader_settings(settings))
    return data, Labelled(
        rows=rows, labels=labels, molecules=[str(row) for row in rows], objective=objective
    )


def markdown(rows: Sequence[RemedyFigures]) -> str:
    """Write the table as Markdown; savings are against the first row."""
    lines = [
        "| remedy | flag | claim | document's size | CPU size, predicted | measured | effect |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        is_first = row is rows[0]
        document = _with_saving(
            row.document_predicted_bytes, None if is_first else row.document_saved_fraction
        )
        measured = "not on one CPU"
        if row.cpu_measured_bytes is not None:
            saving = None if is_first else row.cpu_saved_fraction
            measured = _with_saving(row.cpu_measured_bytes, saving)
        cells = (
            row.name,
            f"`{row.flag}`",
            row.claim,
            document,
            format_bytes(row.cpu_predicted_bytes),
            measured,
            row.effect,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_saving(num_bytes: int, saved_fraction: float | None) -> str:
    if saved_fraction is None:
        return format_bytes(num_bytes)
    if abs(saved_fraction) < 0.0005:
        return f"{format_bytes(num_bytes)} (saves nothing)"
    verb = "saves" if saved_fraction > 0 else "adds"
    return f"{format_bytes(num_bytes)} ({verb} {abs(saved_fraction):.1%})".replace("%", " %")
