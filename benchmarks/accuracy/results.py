"""The scores as plain data: what benchmarks/results/accuracy_gpu.json and --json-out hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .metrics import (
    QUANTITIES,
    ContextReading,
    Score,
    Summary,
    count_verdicts,
    summaries,
    summary,
)
from .rows import Row

SEVERAL_RANKS = "several ranks"
ADAPTERS = "LoRA and QLoRA on one card"
KINDS = ("budget", "card", "cap", "oom")
RECORDED = "memfit-recorded"
"""The source of rows that were recorded on a card for this; they are summed up apart."""


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """Return all rows, and the sums over each source and over all of them."""
    sources = dict.fromkeys(score.row.source for score in scores)
    complete = [
        score for score in scores if not score.row.published and score.row.source != RECORDED
    ]
    return {
        "summaries": [asdict(each) for each in summaries(scores)],
        "overall": [asdict(summary("all", quantity, complete)) for quantity in QUANTITIES],
        "collected": [asdict(each) for each in _collected(scores)],
        "verdicts": {
            "all": _counts(complete),
            **{
                source: _counts([each for each in scores if each.row.source == source])
                for source in sources
            },
        },
        "rows": [_row(score) for score in scores],
    }


def _collected(scores: Sequence[Score]) -> Iterator[Summary]:
    """Sum up the rows of the collection: of several ranks, and of adapters on one card."""
    kinds = {
        SEVERAL_RANKS: [each for each in scores if each.row.published and each.row.ranks > 1],
        ADAPTERS: [
            each
            for each in scores
            if each.row.published and each.row.ranks == 1 and each.row.lora is not None
        ],
    }
    for title, of_kind in kinds.items():
        for quantity in QUANTITIES:
            found = summary(title, quantity, of_kind)
            if found.rows:
                yield found


def context_readings(content: Mapping[str, Any]) -> tuple[ContextReading, ...]:
    """Read off stored scores what each process held besides reserved memory."""
    found = []
    for row in content["rows"]:
        figures = row.get("figures") or {}
        process = figures.get("process", {}).get("measured_bytes")
        reserved = figures.get("reserved", {})
        inside = reserved.get("measured_bytes") or reserved.get("predicted_bytes")
        if process is not None and inside is not None:
            names = {key: row[key] for key in ("id", "source", "device", "torch_version", "model")}
            found.append(ContextReading(**names, num_bytes=process - inside))
    return tuple(found)


def _counts(scores: Sequence[Score]) -> dict[str, Any]:
    total = asdict(count_verdicts(scores))
    return total | {"by_kind": {kind: asdict(count_verdicts(scores, (kind,))) for kind in KINDS}}


def _row(score: Score) -> dict[str, Any]:
    """Return one row; figures are missing where it could not be predicted."""
    row, predicted = score.row, score.predicted
    fields = _described(row) | {"failure": score.failure}
    if predicted is None:
        return fields
    return fields | {
        "catalogue_device": predicted.device,
        "context_bytes": score.context_bytes,
        "context_rows": score.context_rows,
        "smallest_bytes": predicted.smallest_bytes,
        "seconds": round(predicted.seconds, 1),
        "notes": list(predicted.notes),
        "figures": {
            name: {
                "predicted_bytes": figure.predicted_bytes,
                "low_bytes": figure.interval.low_bytes,
                "high_bytes": figure.interval.high_bytes,
                "measured_bytes": figure.measured_bytes,
                "error": figure.error,
                "peak": figure.peak and asdict(figure.peak),
            }
            for name, figure in score.figures.items()
        },
        "verdicts": _verdicts(score),
    }


def _described(row: Row) -> dict[str, Any]:
    keys = ("id", "source", "model", "device", "torch_version", "precision", "outcome")
    return {key: getattr(row, key) for key in keys} | {
        "optimizer": row.optimizer.rpartition(".")[2],
        "batch_size": row.batch_size,
        "seq_len": row.seq_len,
        "is_adapted": row.lora is not None,
        "is_quantized": row.quantization is not None,
        "ranks": row.ranks,
        "split": row.split,
        "is_collected": bool(row.published),
    }


def _verdicts(score: Score) -> Iterable[dict[str, Any]]:
    return [asdict(verdict) | {"is_wrong": verdict.is_wrong} for verdict in score.verdicts]
