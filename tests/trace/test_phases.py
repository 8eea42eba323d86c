"""The parts of a step that says nothing of them: forward, backward and the optimizer's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.slow


def scaled(model, optimizer, losses):
    """Do a step as recipes for mixed precision do."""
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses():
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clipped(model, optimizer, losses):
    """Do a step that clips, and logs before it does."""
    for loss in losses():
        loss.backward()
    torch.zeros(64, device="cuda").add(1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def steps_of(update, num_pieces):
    def setup():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def losses():
            for _ in range(num_pieces):
                with torch.autocast("cuda", dtype=torch.float16):
                    yield model(torch.randn(32, 64, device="cuda")).square().mean()

        def step():
            update(model, optimizer, losses)
            optimizer.zero_grad()

        return step

    return setup


@pytest.mark.parametrize("update", [scaled, clipped])
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_each_backward_is_one_and_the_update_is_the_optimizers(update, num_pieces) -> None:
    timeline = memfit.predict_step(steps_of(update, num_pieces), "t4").timeline

    assert timeline is not None
    names = [name for _, name in timeline.phases if name != "setup"]
    assert names == ["forward", "backward"] * num_pieces + ["optimizer"]
