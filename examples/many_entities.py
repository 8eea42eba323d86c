"""A loss over every entity, streamed by a plan: same loss, same gradients, no score matrix.

    python examples/many_entities.py

The loss is one of `memfit.losses`, so a plan may stream it; the loss function stays as it is.
`require` asks for that. Without it the planner takes whatever it estimates to be fastest.
"""

import torch
from torch import Tensor, nn

import memfit
from memfit.losses import one_to_many_bce
from memfit.units import format_bytes

NUM_ENTITIES, WIDTH, NUM_POSITIVES, BATCH_SIZE = 20_000, 64, 4, 256


class Scorer(nn.Module):
    """An embedding per entity, and one layer that turns an entity into a query."""

    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Embedding(NUM_ENTITIES, WIDTH)
        self.bias = nn.Parameter(torch.zeros(NUM_ENTITIES))
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, heads: Tensor) -> Tensor:
        """Turn heads (batch,) into queries (batch, width)."""
        return self.query(self.entities(heads))


def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return heads (batch,) and the entities that are true for each, (batch, positives)."""
    heads = torch.randint(NUM_ENTITIES, (batch_size,))
    return heads, torch.randint(NUM_ENTITIES, (batch_size, NUM_POSITIVES))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Score each head against every entity."""
    assert isinstance(model, Scorer), "the job's model() gives a Scorer"
    heads, positives = batch
    return one_to_many_bce(model(heads), model.entities.weight, model.bias, positives)


job = memfit.Job(
    model=Scorer,
    batch=make_batch,
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    batch_size=BATCH_SIZE,
)


def main() -> None:
    """Fit the step into half of its plain memory, prove the result, and run a step."""
    plain_bytes = memfit.predict(job).peak_allocated_bytes
    plan = memfit.plan(job, budget=plain_bytes // 2, require=["loss-chunking"])
    print(f"plain:     {format_bytes(plain_bytes)}")
    print(f"plan:      {' + '.join(plan.labels())} ({plan.numerics})")
    print(f"predicted: {format_bytes(plan.prediction.peak_allocated_bytes)}")
    print(f"measured:  {format_bytes(memfit.measure(job, plan).peak_allocated_bytes)}")
    print(f"gradients: relative error {memfit.verify(job, plan).gradient_error:.1e}")


if __name__ == "__main__":
    main()
