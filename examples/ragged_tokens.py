"""Ragged batches: give the loss as a sum and a count, and micro-batches stay exact.

    python examples/ragged_tokens.py

Sentences differ in length. A mean over tokens is then no mean over sentences: micro-batches with
few tokens would count too much. `memfit.Total(sum, count)` says what the loss is made of.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.strategies import MicroBatching

NUM_TOKENS, LENGTH, WIDTH, PADDING = 100, 24, 32, -1


def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Get tokens and targets, both (batch, length); past a sentence's end targets are PADDING."""
    tokens = torch.randint(NUM_TOKENS, (batch_size, LENGTH))
    lengths = torch.arange(batch_size) % LENGTH + 1
    is_padding = torch.arange(LENGTH) >= lengths[:, None]
    return tokens, tokens.masked_fill(is_padding, PADDING)


def token_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' losses and their number."""
    tokens, targets = batch
    scores = model(tokens).flatten(0, 1)
    total = F.cross_entropy(scores, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


def as_total(model: nn.Module, batch: tuple[Tensor, Tensor]) -> memfit.Total:
    """Return what the loss is made of."""
    return memfit.Total(*token_losses(model, batch))


def as_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Hide it: right for the whole batch, and refused as soon as the batch is split."""
    total, count = token_losses(model, batch)
    return total / count


job = memfit.Job(
    model=lambda: nn.Sequential(nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, NUM_TOKENS)),
    batch=make_batch,
    loss=as_total,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
)


def main() -> None:
    """Compare one step in micro-batches with the plain one, for both ways to write the loss."""
    plan = memfit.Plan(strategies=(MicroBatching(micro_batch_size=3),))
    for name, loss in (("Total(sum, count)", as_total), ("a mean over tokens", as_mean)):
        try:
            found = memfit.verify(replace(job, loss=loss), plan)
        except memfit.MemfitError as error:
            print(f"{name}: refused. {error}")
        else:
            print(f"{name}: largest relative error of the gradients {found.gradient_error:.1e}")


if __name__ == "__main__":
    main()
