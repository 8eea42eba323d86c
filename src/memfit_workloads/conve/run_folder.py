"""The files of one run: each written whole, under names that do not change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import write_atomically

from .data import Graph
from .memory_plan import PlannedMemory
from .settings import TrainingSettings
from .sizes import ConvESizes

_MEMORY_CLEANUP_NOTE = (
    "No effect either way: the allocator's cache is never emptied, as that saves nothing at the "
    "peak and makes the next step allocate again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where a run's files lie."""

    root: Path
    checkpoints: Path

    @property
    def best_model(self) -> Path:
        """The weights with the best validation MRR."""
        return self.root / "best_model.pt"

    @property
    def final_model(self) -> Path:
        """The weights after the last epoch, there only if training came to its end."""
        return self.root / "final_model.pt"

    def checkpoint(self, epoch: int) -> Path:
        """Give the place of the checkpoint after an epoch."""
        return self.checkpoints / f"checkpoint_epoch_{epoch}.pt"

    def begin(self, *, overwrite: bool) -> None:
        """Make the folder ready for a new run.

        Raises:
            UsageError: if another run lies there that is not to be replaced.
        """
        earlier = [path for path in self._outputs() if path.exists()]
        if earlier and not overwrite:
            msg = (
                f"{self.root} already holds a run ({earlier[0].name}). Continue it with "
                "--resume-from-checkpoint auto, replace it with --overwrite, or give another "
                "--output-dir."
            )
            raise UsageError(msg)
        for path in earlier:
            path.unlink()
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def resume(self) -> None:
        """Make the folder ready to continue: what is final belongs to a run that has ended."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for path in (self.final_model, self.root / "test_results.json"):
            path.unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write a value as JSON; NaN and infinity are refused."""
        write_atomically(self.root / name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write what every epoch gave, as one JSON value and as one line per epoch."""
        self.write_json("training_history.json", history)
        lines = (json.dumps(epoch, allow_nan=False) + "\n" for epoch in history)
        write_atomically(self.root / "metrics.jsonl", "".join(lines))

    def write_names(self, graph: Graph) -> None:
        """Write the ids behind the weights' rows, as ``name TAB id``."""
        for kind, ids in (("entity", graph.entity_ids), ("relation", graph.relation_ids)):
            lines = (f"{name}\t{number}\n" for name, number in ids.items())
            write_atomically(self.root / f"{kind}_to_id.txt", "".join(lines))

    def _outputs(self) -> list[Path]:
        names = ("config.json", "best_model.pt", "final_model.pt", "training_history.json")
        more = ("test_results.json", "metrics.jsonl", "plan.yaml", "report.html", "timeline.png")
        fixed = [self.root / name for name in (*names, *more)]
        return [*sorted(self.checkpoints.glob("checkpoint_*.pt")), *fixed]


def config_json(
    settings: TrainingSettings, sizes: ConvESizes, graph: Graph, planned_memory: PlannedMemory
) -> dict[str, Any]:
    """Put together what config.json says: data, model, training, optimizations."""
    told = settings.to_json()
    files = told.pop("files")
    flags = told.pop("memory_settings")
    told.pop("image")
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
            "use_mixed_precision": settings.memory_settings.use_mixed_precision,
            "use_gradient_checkpointing": settings.memory_settings.use_gradient_checkpointing,
            "enable_memory_cleanup": settings.memory_settings.memory_cleanup,
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
