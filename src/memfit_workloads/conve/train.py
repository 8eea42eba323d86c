"""ConvE as a system to train: triples in, ranks out."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memfit.files import write_atomically
from memfit.job import Job
from memfit.losses import one_to_many_bce
from memfit_workloads import train as training
from memfit_workloads.conve.data import read_watched
from memfit_workloads.epochs import BEST, FINAL, HISTORY, EpochSystem
from memfit_workloads.memory_settings import plain_values
from memfit_workloads.planned_memory import PlannedMemory, has_bfloat16, plan_memory
from memfit_workloads.run_files import RunFiles
from memfit_workloads.system import Outcome

from .batches import QueryBatch, QueryBatches
from .data import Graph
from .evaluation import Evaluation
from .model import ConvE, build_model
from .queries import Queries
from .settings import K_VS_ALL, TrainingSettings
from .sizes import ConvESizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


_TEST_RESULTS = "test_results.json"
_MEMORY_CLEANUP_NOTE = (
    "No effect either way: the allocator's cache is never emptied, as that saves nothing at the "
    "peak and makes the next step allocate again."
)


def train(settings: TrainingSettings, console: Console) -> dict[str, Any]:
    """Train ConvE as the settings say, and rank the test triples with the best weights."""
    return training.train(ConvETraining(settings, console))


class ConvETraining(EpochSystem):
    """ConvE on one knowledge graph."""

    name = "conve"
    title = "ConvE"
    score = "mrr"
    remedy = "Lower --learning-rate, or leave out --use-mixed-precision."
    main_files = "report.html, plan.yaml, metrics.jsonl, best_model.pt"
    settings: TrainingSettings

    def __init__(self, settings: TrainingSettings, console: Console) -> None:
        super().__init__(settings, console)
        graph = read_watched(settings.files, console, skip_bad_lines=settings.skip_bad_lines)
        if graph.num_bad_lines:
            console.print(f"Left out {graph.num_bad_lines} lines that could not be used.")
        self._graph = graph
        self._sizes = sizes_for(settings, graph)
        self._queries = training_queries(settings, graph)
        self._all_batches = training_batches(settings, self._queries)
        self.job = build_job(settings, self._sizes, self._all_batches)
        self.folder = RunFiles(
            root=settings.output_dir,
            checkpoints=settings.checkpoint_dir,
            own=(BEST, FINAL, HISTORY, _TEST_RESULTS),
            final=(FINAL, _TEST_RESULTS),
        )

    def plan(self) -> PlannedMemory:
        """Find the plan, with float16 in the place of bfloat16 where the device has none."""
        memory = replace(self.settings.memory_settings, num_steps=self.most_steps)
        if "bf16" in memory.require and not has_bfloat16(memory.device):
            self.console.print("--use-mixed-precision: fp16, as this device has no bfloat16")
            required, allowed = (
                tuple("fp16" if name == "bf16" else name for name in names)
                for names in (memory.require, memory.allow)
            )
            memory = replace(memory, require=required, allow=allowed)
        return plan_memory(self.job, memory)

    @property
    def num_rows(self) -> int:
        """Return the number of queries."""
        return len(self._queries)

    def batch(self, rows: Tensor) -> QueryBatch:
        """Cut queries out."""
        batch: QueryBatch = tree_map(
            lambda part: part.to(self._device), self._all_batches.batch(rows)
        )
        return batch

    def cut(self, order: Tensor) -> Sequence[Tensor]:
        """Cut the queries of an epoch into batches, none of a single row."""
        return self._all_batches.cut(order)

    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch."""
        return self.settings.learning_rate * self.settings.learning_rate_decay**epoch

    def begin(self) -> None:
        """Prepare evaluation in what the budget leaves."""
        super().begin()
        self._evaluation = Evaluation.of(self._graph, self._sizes, self._free_bytes())
        self._device = next(self.run.model.parameters()).device

    def _free_bytes(self) -> int | None:
        """Return what a budget leaves for evaluation beside weights and optimizer states."""
        planned = self.planned_memory
        if planned.budget_bytes is None:
            return None
        parts = ("parameters", "buffers", "optimizer state")
        held = sum(planned.planned.by_category.get(part, 0) for part in parts)
        # One row of scores has to fit in any case.
        return max(planned.budget_bytes - held, 10 * self._sizes.num_entities)

    def validate(self) -> tuple[float, dict[str, Any]]:
        """Rank the validation triples."""
        model: Any = self.run.model
        valid = self._evaluation.metrics(model, self._graph.valid)
        return valid["both"]["mrr"], valid

    def model_config(self) -> dict[str, Any]:
        """Return the model's sizes."""
        return self._sizes.to_json()

    def data_config(self) -> dict[str, Any]:
        """Return the number of queries."""
        return {"num_queries": len(self._queries)}

    def write_inputs(self) -> None:
        """Write the ids behind the weights' rows, as ``name TAB id``."""
        ids_by_kind = {"entity": self._graph.entity_ids, "relation": self._graph.relation_ids}
        for kind, ids in ids_by_kind.items():
            lines = (f"{name}\t{number}\n" for name, number in ids.items())
            write_atomically(self.folder.root / f"{kind}_to_id.txt", "".join(lines))

    def config(self) -> dict[str, Any]:
        """Put together what config.json says: data, model, training, optimizations."""
        settings, graph, planned = self.settings, self._graph, self.planned_memory
        told = plain_values(settings)
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
            "model": self._sizes.to_json(),
            "training": told,
            "optimizations": {
                "use_mixed_precision": settings.use_mixed_precision,
                "use_gradient_checkpointing": settings.use_gradient_checkpointing,
                "enable_memory_cleanup": settings.memory_cleanup,
                "memory_cleanup_note": _MEMORY_CLEANUP_NOTE,
                **planned.to_json(),
                "device": planned.run_device,
                "allow": flags["allow"],
            },
        }

    def outcome(self) -> Outcome:
        """Rank the test triples with the weights of the best validation."""
        name, epoch = self.load_best()
        model: Any = self.run.model
        ranks = self._evaluation.metrics(model, self._graph.test)
        test = {"model": name, "epoch": epoch, **ranks}
        both = test["both"]
        said = (
            f"test ({name}, epoch {epoch}): MRR {both['mrr']:.4f}, "
            f"hits@1 {both['hits_at_1']:.3f}, hits@10 {both['hits_at_10']:.3f}"
        )
        return Outcome(
            metrics={
                "loss": self.state.history[-1]["loss"],
                "valid_mrr": self.state.best_score,
                **{f"test_{name}": value for name, value in both.items()},
            },
            own={
                "test": test,
                "num_epochs": self.state.epoch,
                "best_epoch": self.state.best_epoch,
                "num_bad_lines": self._graph.num_bad_lines,
            },
            lines=(said,),
        )

    def write_results(self, result: dict[str, Any], lines: Sequence[str]) -> None:
        """Write the ranks of the test triples."""
        del lines
        self.folder.write_json(_TEST_RESULTS, result["test"])


def sizes_for(settings: TrainingSettings, graph: Graph) -> ConvESizes:
    """Put the sizes from the flags and from the data together."""
    return ConvESizes(
        num_entities=graph.num_entities,
        num_relations=graph.num_relations,
        **asdict(settings.image),
    )


def training_queries(settings: TrainingSettings, graph: Graph) -> Queries:
    """Make the rows to train on."""
    make = Queries.grouped if settings.training_target == K_VS_ALL else Queries.one_per_triple
    return make(graph.train, graph.num_relations)


def training_batches(settings: TrainingSettings, queries: Queries) -> QueryBatches:
    """Choose how the rows are put into batches."""
    return QueryBatches.of(queries, settings.batch_size, settings.random_seed)


def build_job(settings: TrainingSettings, sizes: ConvESizes, batches: QueryBatches) -> Job:
    """Describe one training step of ConvE to memfit.

    The loss is memfit's own one-to-many loss, so that a plan can stream it over the entities.
    """

    def loss(model: nn.Module, batch: QueryBatch) -> Tensor:
        assert isinstance(model, ConvE), "the job's model() gives a ConvE"
        return one_to_many_bce(
            model.encode(batch.heads, batch.relations),
            model.entity_embedding.weight,
            model.entity_bias,
            batch.positives,
            label_smoothing=settings.label_smoothing,
        )

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=settings.learning_rate)

    return Job(
        model=lambda: build_model(sizes, settings.random_seed),
        batch=batches.largest,
        loss=loss,
        optimizer=optimizer,
        batch_size=min(settings.batch_size, len(batches.queries)),
        name="conve",
    )
