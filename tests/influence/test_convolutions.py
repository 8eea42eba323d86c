"""Kernels of every kind: their gradients, read from windows, are those of backward passes."""

import pytest
import torch
from tests.influence.models import Case
from tests.influence.test_gradients import AMPLE_BYTES, NEAR, errors_of, reader_of
from torch import nn

from memfit.influence.proof import prove
from memfit.influence.samples import Samples

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SETTINGS = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2, "groups": 2},
    {"stride": 3, "groups": 4, "bias": False},
]


def case_of(layer: nn.Module) -> Case:
    torch.manual_seed(0)
    spatial = (9, 8, 7)[: layer.weight.dim() - 2]

    def loss(model, batch):
        return torch.sin(model(batch)).flatten(1).sum(dim=1)

    return Case(layer.double(), loss, torch.randn(6, 4, *spatial, dtype=torch.float64))


@pytest.mark.parametrize("kind", [*PLAIN, *TRANSPOSED])
@pytest.mark.parametrize("settings", SETTINGS)
def test_kernels_are_read(kind, settings) -> None:
    torch.manual_seed(1)
    case = case_of(kind(4, 8, kernel_size=3, **settings))
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", (2, 1)])
def test_every_padding_is_read(mode: str, padding) -> None:
    torch.manual_seed(1)
    case = case_of(nn.Conv2d(4, 3, kernel_size=(5, 3), padding=padding, padding_mode=mode))
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR


def test_an_output_padding_that_windows_reach_into_is_read() -> None:
    torch.manual_seed(1)
    case = case_of(nn.ConvTranspose2d(4, 3, 3, stride=3, output_padding=(2, 1), dilation=2))
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR


def test_frames_that_are_folded_into_the_batch_are_read() -> None:
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)

        def forward(self, clips):
            return self.layer(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])

    torch.manual_seed(1)
    case = Case(
        Frames().double(),
        lambda model, batch: torch.sin(model(batch)).flatten(1).sum(dim=1),
        torch.randn(6, 4, 2, 5, 5, dtype=torch.float64),
    )
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR
