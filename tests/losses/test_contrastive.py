"""Contrastive losses and one-to-many cross-entropy, streamed over keys; embeddings encoded again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.errors import JobError
from memfit.losses import cached_embeddings, contrastive_loss, one_to_many_cross_entropy
from memfit.observe.allocator_events import AllocatorWatch


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def assert_same(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    pairs = zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True
    )
    for a, b in pairs:
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [None, 1, 4, 9, 20])
def test_the_contrastive_loss_is_a_cross_entropy_over_all_keys(chunk):
    queries, keys = tensors((5, 3), (9, 3))
    expected = F.cross_entropy(queries @ keys.T / 0.2, torch.arange(5))
    assert_same(
        contrastive_loss(queries, keys, temperature=0.2, chunk=chunk), expected, [queries, keys]
    )


@pytest.mark.parametrize("chunk", [None, 2, 7])
def test_one_to_many_cross_entropy_with_and_without_bias(chunk):
    query, candidates, bias = tensors((5, 3), (7, 3), (7,))
    target = torch.tensor([0, 6, 3, 3, 1])
    expected = F.cross_entropy(F.linear(query, candidates, bias), target)
    found = one_to_many_cross_entropy(query, candidates, bias, target, chunk=chunk)
    assert_same(found, expected, [query, candidates, bias])
    bare = one_to_many_cross_entropy(query, candidates, None, target, chunk=chunk)
    assert_same(bare, F.cross_entropy(query @ candidates.T, target), [query, candidates])


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_cached_embeddings_give_the_gradients_of_encoding_everything_at_once(chunk):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    (inputs,) = tensors((8, 4))
    whole, found = encoder(inputs), cached_embeddings(encoder, inputs, chunk=chunk)
    weights = [*encoder.parameters(), inputs]
    assert_same(
        contrastive_loss(found, found, chunk=2),
        F.cross_entropy(whole @ whole.T, torch.arange(8)),
        weights,
    )


def test_cached_embeddings_draw_the_same_masks_twice():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    (inputs,) = tensors((6, 4))
    torch.manual_seed(5)
    found = cached_embeddings(encoder, inputs, chunk=2)
    torch.manual_seed(5)
    whole = torch.cat([encoder(part) for part in inputs.split(2)])
    assert_same(found.square().sum(), whole.square().sum(), [*encoder.parameters()])


def test_memory_does_not_grow_with_the_keys():
    def peak(num_keys: int) -> int:
        queries, keys = torch.randn(32, 4, requires_grad=True), torch.randn(num_keys, 4)
        with AllocatorWatch() as watch:
            contrastive_loss(queries, keys, torch.randn(32, 4), chunk=64).backward()
        return watch.highest_growth_bytes()

    assert peak(6400) <= 1.1 * peak(640)


def test_scores_are_computed_in_float32_under_autocast():
    queries, keys = (t.detach().float() for t in tensors((5, 3), (9, 3)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contrastive_loss(queries, keys, temperature=0.05, chunk=4)
    expected = F.cross_entropy(queries @ keys.T / 0.05, torch.arange(5))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_does_not_belong_together_is_refused():
    queries, keys = tensors((5, 3), (4, 3))
    with pytest.raises(JobError, match=r"\(5, 3\), \(4, 3\), \(4, 3\)"):
        contrastive_loss(queries, keys)
    with pytest.raises(JobError, match="temperature is 0"):
        contrastive_loss(queries, keys, queries, temperature=0)
    with pytest.raises(JobError, match="chunk size"):
        cached_embeddings(lambda x: x, queries, chunk=0)
