"""Shows the settings of a card, for people and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from memfit.configfile.batches import Batch
from memfit.configfile.changes import rows_of
from memfit.devices.occupancy import CardProcess
from memfit.devices.spec import CPU
from memfit.units import GIB, MIB, format_bytes

from .card_profile import StageProfile
from .card_settings import LITTLE_FRACTION, Card, StageSettings, Wanted, printed_gib
from .card_settings_files import Written
from .reference_estimate import DIFFERENCES

_NO_JOB = (
    "memfit's own prediction needs the packages of the workload: pip install 'memfit[naics]'. The "
    "figures are the guide's formula; what follows says how far to trust it."
)
_NO_DEVICE = (
    "memfit's own prediction needs a card of its catalogue: --device NAME instead of --gpu-memory."
)


def settings_lines(
    card: Card, stages: Sequence[StageSettings], wanted: Wanted, written: Written | None
) -> list[str]:
    """Write everything, line by line."""
    free = f", {card.free_bytes / GIB:.2f} GB free" if card.free_bytes is not None else ""
    lines = [f"{card.title}: {card.memory_bytes / GIB:.2f} GB{free}", *_process_lines(card), ""]
    for each in stages:
        lines += [*_stage_lines(each, card, wanted), ""]
    lines += [*_prediction_lines(stages, card), ""]
    lines.append("Where the guide's formula differs from a recorded step:")
    lines += [f"  - {sentence}" for sentence in DIFFERENCES]
    lines += ["", *_warnings(card, stages, wanted)]
    if written is not None:
        lines += _written_lines(written)
    return lines


def profile_lines(profiles: Sequence[StageProfile]) -> list[str]:
    """Write what real steps took, beside what was predicted for them and the formula."""
    return [
        f"Stage {each.stage}, {each.batch_size} anchors, one step on "
        f"{'this CPU' if each.device == CPU else each.device}: measured "
        f"{format_bytes(each.measured_bytes)}, predicted {format_bytes(each.predicted_bytes)} "
        f"({each.measured_bytes / each.predicted_bytes - 1:+.1%}); the formula says "
        f"{format_bytes(each.expected_bytes)} for the card."
        for each in profiles
    ]


def as_json(
    card: Card, stages: Sequence[StageSettings], wanted: Wanted, written: Written | None
) -> dict[str, Any]:
    """Return everything as plain values."""
    return {
        "card": {
            "title": card.title,
            "memory_bytes": card.memory_bytes,
            "free_bytes": card.free_bytes,
            "device": card.device,
            "other_processes": [
                {"pid": each.pid, "name": _name(each), "used_bytes": each.used_bytes}
                for each in card.other_processes
            ],
        },
        "target_effective_batch": wanted.effective_size,
        "safety_margin": wanted.safety_margin,
        "stages": [_stage_json(each, card) for each in stages],
        "differences": list(DIFFERENCES),
        "warnings": list(_warnings(card, stages, wanted)),
        "files": rows_of(written.files) if written else [],
        "notes": list(written.notes) if written else [],
        "folder": str(written.folder) if written else None,
        "is_written": bool(written and written.record),
    }


def _process_lines(card: Card) -> Iterator[str]:
    for each in card.other_processes:
        used = "unknown" if each.used_bytes is None else format_bytes(each.used_bytes)
        yield f"  also on the card: {_name(each)} (process {each.pid}), {used}"


def _name(process: CardProcess) -> str:
    try:
        return psutil.Process(process.pid).name()
    except psutil.Error:
        return "a process of another user or container"


def _stage_lines(each: StageSettings, card: Card, wanted: Wanted) -> Iterator[str]:
    yield f"Stage {each.stage}"
    yield f"  batch_size: {each.batch.micro_batch_size}"
    yield f"  accumulate_grad_batches: {each.batch.accumulation}"
    if each.batch.num_devices > 1:
        yield f"  devices: {each.batch.num_devices}"
    yield f"  effective batch: {each.batch.product()}"
    yield f"  n_positives: {each.n_positives}  # they lengthen the epoch, not the step"
    yield f"  n_negatives: {each.n_negatives}"
    for name, num_bytes in each.estimate.parts().items():
        yield f"    {name:<18}{num_bytes / MIB:>10,.1f} MB"
    yield f"    {'Total':<18}{each.estimate.total_mb:>10,.1f} MB"
    by = "" if each.prediction is None else " by memfit's prediction"
    expected = f"{each.used_bytes() / GIB:.2f} GB, {_used(each, card):.0%} of the card{by}"
    yield f"  expected: {expected}"
    guide = each.guide_batch
    misses = guide.effective_size != wanted.effective_size
    note = f", which misses {wanted.effective_size}" if misses else ""
    yield (
        f"  the guide's own rule: {guide.micro_batch_size} x {guide.accumulation} = "
        f"{guide.effective_size}{note}; {each.guide_estimate.total_bytes / GIB:.2f} GB"
    )


def _used(each: StageSettings, card: Card) -> float:
    return each.used_bytes() / card.memory_bytes


def _prediction_lines(stages: Sequence[StageSettings], card: Card) -> Iterator[str]:
    found = [each for each in stages if each.prediction is not None]
    if not found:
        yield _NO_DEVICE if card.device is None else _NO_JOB
        return
    yield f"memfit's own prediction for {card.device}, beside the guide's formula:"
    for each in found:
        assert each.prediction is not None
        predicted_bytes = each.prediction.process_bytes
        ratio = each.estimate.total_bytes / predicted_bytes
        yield (
            f"  stage {each.stage}: {format_bytes(predicted_bytes)}; the formula says "
            f"{format_bytes(each.estimate.total_bytes)}, {ratio:.2f} times as much"
        )
        for size, num_bytes in each.too_large:
            yield f"    {size} per micro-batch would take {format_bytes(num_bytes)}"


def _warnings(card: Card, stages: Sequence[StageSettings], wanted: Wanted) -> Iterator[str]:
    for each in stages:
        if each.used_bytes() > card.usable_bytes:
            yield (
                f"Stage {each.stage} takes {format_bytes(each.used_bytes())} with one sample per "
                "micro-batch, more than the card has. `memfit train naics --budget` plans for less."
            )
        if _used(each, card) < LITTLE_FRACTION:
            yield (
                f"Stage {each.stage} is expected to use {_used(each, card):.0%} of the card, less "
                f"than half. A larger --target-effective-batch than {wanted.effective_size}, or "
                "more negatives, would use more."
            )
    if card.other_processes:
        yield (
            "Other processes hold memory of the card; the settings are for what they leave. End "
            "them and ask again to use all of it."
        )
    printed = printed_gib(card)
    formula_bytes = stages[0].guide_estimate.total_bytes
    if printed is not None and abs(printed - formula_bytes / GIB) >= 0.1:
        yield (
            f"The guide prints {printed} GB for stage 01 on such a card; its own formula gives "
            f"{formula_bytes / GIB:.2f} GB for {stages[0].guide_batch.micro_batch_size} samples on "
            f"{card.memory_bytes / GIB:.2f} GB."
        )


def _written_lines(written: Written) -> list[str]:
    lines = [each.diff() for each in written.files] + list(written.notes)
    if not written.files:
        return [*lines, "Nothing to change: the files say so already."]
    if written.record is None:
        return [*lines, "Nothing has been written; --apply writes it."]
    backups = [f"Backup: {written.folder / each.backup}" for each in written.record.files]
    return [*lines, *backups, f"Written. `memfit undo {written.folder}` puts it back."]


def _stage_json(each: StageSettings, card: Card) -> dict[str, Any]:
    prediction = each.prediction
    return {
        "stage": each.stage,
        **_batch_json(each.batch),
        "n_positives": each.n_positives,
        "n_negatives": each.n_negatives,
        "largest_batch_size": each.most_samples,
        "expected_bytes": each.used_bytes(),
        "formula_bytes": each.estimate.total_bytes,
        "too_large": [
            {"batch_size": size, "predicted_bytes": num_bytes} for size, num_bytes in each.too_large
        ],
        "utilisation_fraction": _used(each, card),
        "breakdown_bytes": {
            name.lower().replace(" ", "_"): part for name, part in each.estimate.parts().items()
        },
        "guide": {
            **_batch_json(each.guide_batch),
            "expected_bytes": each.guide_estimate.total_bytes,
        },
        "predicted_bytes": None if prediction is None else prediction.process_bytes,
    }


def _batch_json(batch: Batch) -> dict[str, int]:
    return {
        "batch_size": batch.micro_batch_size,
        "accumulate_grad_batches": batch.accumulation,
        "num_devices": batch.num_devices,
        "effective_batch": batch.effective_size,
    }
