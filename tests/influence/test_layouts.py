"""Where the samples lie in a tensor is told by what weights do to its gradient."""

import pytest
import torch

from memfit.influence.layouts import Layout, layout_of, sample_weights

BATCH, LENGTH, WIDTH = 4, 4, 3


def gradients(shape, sample_of_entry, dtype=torch.float64):
    """Make a gradient whose entries belong to samples, plain and weighted."""
    torch.manual_seed(0)
    weights = sample_weights(torch.zeros(BATCH, dtype=dtype))
    plain = torch.randn(shape, dtype=dtype)
    return plain, plain * weights[sample_of_entry].reshape(shape), weights


def entries(*shape):
    """Number the samples along the first of some dimensions, spread over a shape."""
    return torch.arange(BATCH).reshape(-1, *(1 for _ in shape[1:])).expand(shape)


@pytest.mark.parametrize(
    ("shape", "samples", "expected"),
    [
        ((BATCH, WIDTH), entries(BATCH, WIDTH), (0, True)),
        ((BATCH, LENGTH, WIDTH), entries(BATCH, LENGTH, WIDTH), (0, True)),
        ((LENGTH, BATCH, WIDTH), entries(BATCH, LENGTH, WIDTH).transpose(0, 1), (1, True)),
        ((BATCH * LENGTH, WIDTH), entries(BATCH, LENGTH, WIDTH), (0, True)),
        ((LENGTH * BATCH, WIDTH), entries(BATCH, LENGTH, WIDTH).transpose(0, 1), (0, False)),
        ((WIDTH, BATCH), entries(BATCH, WIDTH).T, (1, True)),
    ],
)
def test_a_layout_is_found(shape, samples, expected) -> None:
    found, is_certain = layout_of(*gradients(shape, samples.reshape(-1)))

    assert (found.dim, found.is_major) == expected
    assert is_certain


def test_mixed_samples_have_none() -> None:
    one, two, weights = gradients((BATCH, WIDTH), entries(BATCH, WIDTH).reshape(-1))
    mixing = torch.rand(BATCH, BATCH, dtype=one.dtype)

    assert layout_of(mixing @ one, mixing @ two, weights)[0] is None


def test_a_sample_with_a_large_gradient_does_not_hide_the_others() -> None:
    samples = entries(BATCH, LENGTH, WIDTH).transpose(0, 1).reshape(-1)
    plain, weighted, weights = gradients((LENGTH * BATCH, WIDTH), samples, torch.float32)
    for each in (plain, weighted):
        each[0::BATCH] *= 1e4  # the first sample, whose first row has the same place in both

    found, _ = layout_of(plain, weighted, weights)
    assert (found.dim, found.is_major) == (0, False)


def test_zeros_leave_it_open() -> None:
    plain, weighted, weights = gradients((BATCH, LENGTH), entries(BATCH, LENGTH).reshape(-1))
    found, is_certain = layout_of(plain * 0.0, weighted * 0.0, weights)

    assert found is not None
    assert not is_certain


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(0, is_major=True, num_samples=BATCH), (BATCH * 2, WIDTH)),
        (Layout(0, is_major=False, num_samples=BATCH), (BATCH * 2, WIDTH)),
        (Layout(1, is_major=True, num_samples=BATCH), (WIDTH, BATCH, 2)),
    ],
)
def test_samples_come_to_the_front(layout: Layout, shape) -> None:
    numbers = torch.arange(BATCH, dtype=torch.float64)
    tensor = torch.ones(shape, dtype=torch.float64) * layout.spread(numbers, shape)
    by_sample = layout.by_sample(tensor).reshape(BATCH, -1)

    assert torch.equal(by_sample, numbers[:, None].expand_as(by_sample))


def test_no_two_weights_are_alike() -> None:
    weights = sample_weights(torch.zeros(512))

    assert len(weights.unique()) == 512
    assert 1.0 <= float(weights.min()) < float(weights.max()) < 2.0
