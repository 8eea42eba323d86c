"""What ConvE's document claims of its memory remedies, beside what they give.

Claimed are 2x for mixed precision, 1.5 to 2x for deleting tensors and emptying the cache, 2 to 3x
for checkpointing, and less than 0.1 % of MRR for 16 bits. Predicted at the document's size on two
cards, predicted and measured at 20,000 entities on the CPU, and learnt on UMLS.

Run: python benchmarks/bench_conve_claims.py [card] [host] [loop] [mrr]   (a quarter of an hour)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from results_file import RESULTS, load_result, save_result
from torch import Tensor

import memfit
from memfit.losses import one_to_many_bce
from memfit.observe.allocator_events import AllocatorWatch
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Strategy
from memfit.strategies.bf16 import Bf16
from memfit.strategies.fp16 import Fp16
from memfit.strategies.loss_chunking import LossChunking
from memfit_workloads.conve.batches import QueryBatch
from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.sizes import ConvESizes

_SMOOTHING = 0.1
_CARD_ENTITIES, _HOST_ENTITIES = 1_000_000, 20_000
_ANSWERS, _CHUNK = 8, 4096
_ROWS = (
    ("as it is", 256, ()),
    ("16 bits", 512, ("16 bits",)),
    ("16 bits, checkpointing", 1024, ("16 bits", "activation-checkpointing")),
    ("checkpointing", 256, ("activation-checkpointing",)),
    ("loss streamed over entities", 256, ("loss-chunking",)),
    ("loss streamed over entities", 1024, ("loss-chunking",)),
)
"""What the document's rows are called here, its batch sizes, and memfit's strategies."""
_CARDS = {"t4": "fp16", "a10-24gb": "bf16"}
_SEEDS = (42, 43, 44)
_UMLS = (
    "--dataset umls --num-epochs 45 --eval-every 15 --batch-size 128 --learning-rate 0.005 "
    "--learning-rate-decay 0.97 --output-channels 16 --input-dropout 0.1 "
    "--feature-map-dropout 0.1 --output-dropout 0.2 --no-gpu"
)


def main() -> None:
    """Run the parts that are named, or all of them."""
    parts: dict[str, Callable[[], Any]] = {
        "card": _card,
        "host": _host,
        "loop": _loop,
        "mrr": _mrr,
    }
    figures: dict[str, Any] = {}
    if (RESULTS / "conve_claims.json").exists():
        figures = {key: load_result("conve_claims").get(key) for key in parts}
    for name in sys.argv[1:] or parts:
        figures[name] = parts[name]()
        save_result("conve_claims", figures)


def _card() -> list[dict[str, Any]]:
    """Predict the document's rows at its size."""
    rows = []
    for device, low in _CARDS.items():
        for name, batch_size, strategies in _ROWS:
            job = _job(_CARD_ENTITIES, batch_size)
            prediction = memfit.predict(job, device, plan=_plan(strategies, low))
            rows.append(
                {
                    "device": device,
                    "name": name.replace("16 bits", low),
                    "batch_size": batch_size,
                    "predicted_peak_bytes": prediction.peak_allocated_bytes,
                    "step_seconds": prediction.step_seconds,
                    "sample_seconds": prediction.step_seconds / batch_size,
                }
            )
    return rows


def _host() -> list[dict[str, Any]]:
    """Predict and measure the rows at a size that this machine holds."""
    rows = []
    for name, batch_size, strategies in _ROWS:
        job = _job(_HOST_ENTITIES, batch_size)
        plan = _plan(strategies, "bf16")
        predicted = memfit.predict(job, "cpu", plan=plan).peak_allocated_bytes
        measured = memfit.measure(job, plan, device="cpu").peak_allocated_bytes
        rows.append(
            {
                "name": name.replace("16 bits", "bf16"),
                "batch_size": job.batch_size,
                "predicted_peak_bytes": predicted,
                "measured_peak_bytes": measured,
                "error_fraction": predicted / measured - 1,
            }
        )
    return rows


def _loop() -> dict[str, Any]:
    """Measure a loop that keeps its last scores and loss, and one that deletes them, as written."""
    return {"kept_bytes": _loop_bytes(deletes=False), "deleted_bytes": _loop_bytes(deletes=True)}


def _loop_bytes(*, deletes: bool) -> int:
    """Return the peak of three steps of a plain loop, weights included."""
    batch_size = 256
    model = build_model(_sizes(_HOST_ENTITIES), 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = _batch(_HOST_ENTITIES, batch_size)
    own_bytes = sum(each.nbytes for each in model.state_dict().values())
    with AllocatorWatch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            scores = model(batch.heads, batch.relations)
            labels = torch.zeros_like(scores)
            labels[torch.arange(batch_size)[:, None], batch.positives] = 1.0
            labels = (1 - _SMOOTHING) * labels + _SMOOTHING / scores.shape[1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
            loss.backward()
            optimizer.step()
            if deletes:
                del scores, labels, loss
    return own_bytes + watch.highest_growth_bytes()


def _mrr() -> list[dict[str, Any]]:
    """Train on UMLS in float32 and in bfloat16, with the same seeds."""
    rows = []
    for seed in _SEEDS:
        plain = _test_mrr("--random-seed", str(seed))
        low = _test_mrr("--random-seed", str(seed), "--use-mixed-precision")
        rows.append({"seed": seed, "float32_mrr": plain, "bfloat16_mrr": low})
    differences = [row["bfloat16_mrr"] - row["float32_mrr"] for row in rows]
    print(f"mean difference {statistics.mean(differences):+.4f}", file=sys.stderr)
    return rows


def _test_mrr(*words: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "memfit", "train", "conve", *_UMLS.split(), *words),
                *("--output-dir", f"{folder}/run", "--json"),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found: float = json.loads(done.stdout)["metrics"]["test_mrr"]
    return found


def _job(num_entities: int, batch_size: int) -> memfit.Job:
    """Return a step of the document's model, with its default sizes."""

    def loss(model: torch.nn.Module, batch: QueryBatch) -> Tensor:
        assert isinstance(model, ConvE), "the job's model() gives a ConvE"
        return one_to_many_bce(
            model.encode(batch.heads, batch.relations),
            model.entity_embedding.weight,
            model.entity_bias,
            batch.positives,
            label_smoothing=_SMOOTHING,
        )

    return memfit.Job(
        model=lambda: build_model(_sizes(num_entities), 0),
        batch=lambda size: _batch(num_entities, size),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size=batch_size,
        name="conve",
    )


def _batch(num_entities: int, batch_size: int) -> Any:
    draw = torch.Generator().manual_seed(0)
    positives = torch.randint(0, num_entities, (batch_size, _ANSWERS), generator=draw)
    heads = torch.arange(batch_size) % num_entities
    return QueryBatch(heads, torch.zeros_like(heads), positives)


def _sizes(num_entities: int) -> ConvESizes:
    return ConvESizes(num_entities=num_entities, num_relations=100)


def _plan(strategies: tuple[str, ...], low: str) -> memfit.Plan:
    """Return a plan of these strategies."""
    made: dict[str, Callable[[], Strategy]] = {
        "fp16": Fp16,
        "bf16": Bf16,
        "activation-checkpointing": ActivationCheckpointing,
        "loss-chunking": lambda: LossChunking(num_candidates=_CHUNK),
    }
    names = (low if name == "16 bits" else name for name in strategies)
    return memfit.Plan(strategies=tuple(made[name]() for name in names))


if __name__ == "__main__":
    main()
