"""Rows that are added up per sample by its number in the batch, and rows that are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.separation.linear_jobs import found_in as found_in_job
from tests.separation.linear_jobs import job_with
from torch import nn

NUM_TOKENS, WIDTH = 6, 5


def found_in(loss):
    batch = lambda size: torch.randint(0, 11, (size, NUM_TOKENS))  # noqa: E731
    return found_in_job(job_with(loss, batch, lambda: nn.Embedding(11, WIDTH)))


def added(owner, base=torch.zeros, scale=1):
    def loss(model, ids):
        rows = model(ids.reshape(-1))
        bags = base(len(ids), WIDTH).index_add(0, owner(len(ids)), rows, alpha=scale)
        return bags.square().mean()

    return loss


def bagged(step, mode="sum", weights=False):
    def loss(model, ids):
        flat, offsets = ids.reshape(-1), torch.arange(0, step * len(ids), step)
        weight = torch.linspace(0, 1, len(flat)) if weights else None
        bags = F.embedding_bag(
            flat, model.weight, offsets, mode=mode, per_sample_weights=weight
        )  # fmt: skip
        return bags.square().mean()

    return loss


def bags_by_frequency(model, ids):
    return F.embedding_bag(ids, model.weight, mode="sum", scale_grad_by_freq=True).square().mean()


def looked_up(index):
    return lambda model, ids: model(ids).sum(1).index_select(0, index(len(ids))).square().mean()


def every_other_row(model, ids):
    rows = model(ids).view(2 * len(ids), -1)
    return rows.index_select(0, torch.arange(0, 2 * len(ids), 2)).square().mean()


OWN = {
    "rows added up": added(lambda n: torch.arange(n).repeat_interleave(NUM_TOKENS)),
    "bags": lambda model, ids: F.embedding_bag(ids, model.weight).square().mean(),
    "bags by offsets": bagged(NUM_TOKENS),
    "maxima of bags": bagged(NUM_TOKENS, "max"),
    "own rows": looked_up(torch.arange),
    "own rows again": looked_up(lambda n: torch.arange(n).repeat_interleave(2)),
}
OTHERS = {
    "owners in another order": added(lambda n: torch.arange(n).repeat(NUM_TOKENS)),
    "owners one further": added(
        lambda n: (torch.arange(n).repeat_interleave(NUM_TOKENS) + 1).clamp(max=n - 1)
    ),
    "bags that are not empty before": added(
        lambda n: torch.arange(n).repeat_interleave(NUM_TOKENS), base=torch.ones
    ),
    "bags that begin too early": bagged(NUM_TOKENS // 2),
    "bags of one row": bagged(1),
    "bags weighted by place": bagged(NUM_TOKENS, weights=True),
    "bags by frequency": bags_by_frequency,
    "rows by their numbers": every_other_row,
    "rows in reverse": looked_up(lambda n: torch.arange(n - 1, -1, -1)),
    "the row before": looked_up(lambda n: (torch.arange(n) - 1).clamp(min=0)),
    "positions added up": lambda model, ids: model(ids).mean()
    * torch.zeros(len(ids), dtype=torch.long)
    .index_add(0, torch.arange(len(ids)), torch.arange(len(ids)))
    .float()
    .mean(),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", OWN)
def test_rows_that_stay_with_their_samples_are_proved(what):
    found = found_in(OWN[what])
    assert found.is_proved, found.sentence


@pytest.mark.parametrize("what", OTHERS)
def test_rows_that_go_elsewhere_are_not_proved(what):
    assert not found_in(OTHERS[what]).is_proved
