"""Every figure of a card's peak is the same: the peak, its parts and the picture."""

from __future__ import annotations

import torch
from torch import nn

import memfit
from memfit.job import Job


def test_parts_and_picture_add_up_to_the_peak_that_the_allocator_counts():
    width = 1000  # whose blocks leave remainders that are not split off
    job = Job(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(4))),
        batch=lambda size: torch.randn(size, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        batch_size=300,
    )
    found = memfit.predict(job, device="t4")

    larger = {term.name: term.num_bytes for term in found.terms}["blocks larger than asked for"]
    assert larger > 0, "otherwise nothing is seen here"
    assert sum(found.by_category.values()) == found.peak_allocated_bytes
    assert sum(found.by_module.values()) == found.peak_allocated_bytes
    assert found.timeline is not None
    assert max(found.timeline.allocated_bytes) == found.peak_allocated_bytes
    parts = zip(*found.timeline.by_category.values(), strict=True)
    assert [sum(each) for each in parts] == list(found.timeline.allocated_bytes)
