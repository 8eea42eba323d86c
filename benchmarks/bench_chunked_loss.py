"""What a step of the one-to-many loss takes with a million entities, plain and streamed.

Run: python benchmarks/bench_chunked_loss.py        (about a minute on two cores)
"""

from __future__ import annotations

from typing import Any

import torch
from results_file import save_result
from torch import Tensor, nn

from memfit import Job, Plan, measure, predict
from memfit.losses import one_to_many_bce
from memfit.strategies import build_strategy

_NUM_ENTITIES = 1_000_000
_DIMENSION = 200
_CHUNK = 4096


class _Scorer(nn.Module):
    """Embeddings and nothing else, so that the loss is what there is."""

    def __init__(self, num_entities: int) -> None:
        super().__init__()
        self.entities = nn.Embedding(num_entities, _DIMENSION)
        self.bias = nn.Parameter(torch.zeros(num_entities))


def _job(batch_size: int, num_entities: int = _NUM_ENTITIES) -> Job:
    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        heads = torch.randint(0, num_entities, (num_samples,))
        return heads, torch.randint(0, num_entities, (num_samples, 3))

    def loss(model: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        heads, positives = inputs
        return one_to_many_bce(
            model.entities(heads), model.entities.weight, model.bias, positives, label_smoothing=0.1
        )

    return Job(
        model=lambda: _Scorer(num_entities),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


def main() -> None:
    """Measure the streamed step at three batch sizes; the plain one is only predicted."""
    plan = Plan(strategies=(build_strategy("loss-chunking", {"num_candidates": _CHUNK}),))
    rows = []
    for batch_size in (16, 64, 256):
        plain = predict(_job(batch_size))
        streamed = measure(_job(batch_size), plan)
        weights = streamed.by_category["parameters"] + streamed.by_category["gradients"]
        rows.append(
            {
                "batch_size": batch_size,
                "score_matrix_bytes": batch_size * _NUM_ENTITIES * 4,
                "plain_predicted_peak_bytes": plain.peak_allocated_bytes,
                "streamed_measured_peak_bytes": streamed.peak_allocated_bytes,
                "streamed_predicted_peak_bytes": streamed.predicted_peak_bytes,
                "streamed_beside_weights_and_gradients_bytes": streamed.peak_allocated_bytes
                - weights,
                "streamed_step_seconds": round(streamed.step_seconds, 2),
            }
        )
    save_result(
        "chunked_loss",
        {
            "num_entities": _NUM_ENTITIES,
            "dimension": _DIMENSION,
            "chunk": _CHUNK,
            "steps": rows,
            "growth_from_16_to_256_rows_bytes": rows[-1]["streamed_measured_peak_bytes"]
            - rows[0]["streamed_measured_peak_bytes"],
        },
    )


if __name__ == "__main__":
    main()
