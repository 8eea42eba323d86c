"""The files of one run: each written whole, under names that do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from memfit.files import write_atomically
from memfit_workloads.planned_memory import PlannedMemory
from memfit_workloads.run_files import RunFiles

from .data import Graph
from .settings import TrainingSettings
from .sizes import ConvESizes

_MEMORY_CLEANUP_NOTE = (
    "No effect either way: the allocator's cache is never emptied, as that saves nothing at the "
    "peak and makes the next step allocate again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder(RunFiles):
    """Where a run's files lie."""

    outputs: ClassVar[Sequence[str]] = (
        *RunFiles.outputs,
        "best_model.pt",
        "final_model.pt",
        "training_history.json",
        "test_results.json",
    )
    final: ClassVar[Sequence[str]] = ("final_model.pt", "test_results.json")

    @property
    def best_model(self) -> Path:
        """The weights with the best validation MRR."""
        return self.root / "best_model.pt"

    @property
    def final_model(self) -> Path:
        """The weights after the last epoch, there only if training came to its end."""
        return self.root / "final_model.pt"

    def checkpoint(self, epoch: int) -> Path:
        """Return the place of the checkpoint after an epoch."""
        return self.checkpoints / f"checkpoint_epoch_{epoch}.pt"

    def write_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write what every epoch gave, as one JSON value and as one line per epoch."""
        self.write_json("training_history.json", history)
        self.write_lines("metrics.jsonl", history)

    def write_names(self, graph: Graph) -> None:
        """Write the ids behind the weights' rows, as ``name TAB id``."""
        for kind, ids in (("entity", graph.entity_ids), ("relation", graph.relation_ids)):
            lines = (f"{name}\t{number}\n" for name, number in ids.items())
            write_atomically(self.root / f"{kind}_to_id.txt", "".join(lines))


def config_json(
    settings: TrainingSettings, sizes: ConvESizes, graph: Graph, planned_memory: PlannedMemory
) -> dict[str, Any]:
    """Put together what config.json says: data, model, training, optimizations."""
    told = settings.to_json()
    files = told.pop("files")
    flags = told.pop("memory_settings")
    told.pop("image")
    told.pop("memory_cleanup")
    return {
        "data": {
            **files,
            "num_entities": graph.num_entities,
            "num_relations": graph.num_relations,
            "num_train": len(graph.train),
            "num_valid": len(graph.valid),
            "num_test": len(graph.test),
            "num_bad_lines": graph.num_bad_lines,
        },
        "model": sizes.to_json(),
        "training": told,
        "optimizations": {
            "use_mixed_precision": settings.use_mixed_precision,
            "use_gradient_checkpointing": settings.use_gradient_checkpointing,
            "enable_memory_cleanup": settings.memory_cleanup,
            "memory_cleanup_note": _MEMORY_CLEANUP_NOTE,
            "strategies": list(planned_memory.plan.labels()),
            "numerics": str(planned_memory.planned.numerics),
            "budget_bytes": planned_memory.budget_bytes,
            "plain_peak_bytes": planned_memory.plain.peak_allocated_bytes,
            "predicted_peak_bytes": planned_memory.planned.peak_allocated_bytes,
            "device": planned_memory.run_device,
            "allow": flags["allow"],
        },
    }
