"""Samples that lie behind one another keep apart where each meets its own part alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.separation.linear_jobs import found_in, job_with
from torch import nn


class Kernels(nn.Module):
    """Filters, and what makes others for each sample."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.style = nn.Linear(2, 2)


def images(size):
    return torch.randn(size, 2, 5, 5), torch.randn(size, 2)


def own_weights(model, batch):
    """Return filters of each sample, (samples, 4, 2, 3, 3)."""
    return model.weight[None] * model.style(batch[1])[:, None, :, None, None]


def modulated(model, batch):
    x, weight = batch[0], own_weights(model, batch)
    out = F.conv2d(x.reshape(1, -1, 5, 5), weight.reshape(-1, 2, 3, 3), groups=len(x))
    return out.reshape(len(x), 4, 3, 3).square().mean()


def transposed(model, batch):
    x, weight = batch[0], own_weights(model, batch).transpose(1, 2)
    out = F.conv_transpose2d(x.reshape(1, -1, 5, 5), weight.reshape(-1, 4, 3, 3), groups=len(x))
    return out.reshape(len(x), 4, 7, 7).square().mean()


def repeated(model, batch):
    x = batch[0]
    weight = model.weight.repeat(len(x), 1, 1, 1)
    out = F.conv2d(x.reshape(1, -1, 5, 5), weight, groups=len(x))
    return out.reshape(len(x), 4, 3, 3).square().mean()


def by_channel(model, batch):
    x, weight = batch[0], own_weights(model, batch)[:, :, :1]
    out = F.conv2d(x.reshape(1, -1, 5, 5), weight.reshape(-1, 1, 3, 3), groups=2 * len(x))
    return out.reshape(len(x), 4, 3, 3).square().mean()


def in_pairs(model, batch):
    x = batch[0]
    weight = torch.cat([own_weights(model, batch)] * 2, 2).reshape(-1, 4, 3, 3)
    out = F.conv2d(x.reshape(1, -1, 5, 5), weight, groups=len(x) // 2)
    return out.reshape(len(x), 4, 3, 3).square().mean()


def channels_first(model, batch):
    x, weight = batch[0], own_weights(model, batch)
    x = x.transpose(0, 1).reshape(1, -1, 5, 5)
    out = F.conv2d(x, weight.reshape(-1, 2, 3, 3), groups=len(batch[0]))
    return out.square().mean()


def weights_of_others(model, batch):
    x, weight = batch[0], own_weights(model, batch).transpose(0, 1)
    out = F.conv2d(x.reshape(1, -1, 5, 5), weight.reshape(-1, 2, 3, 3), groups=len(x))
    return out.reshape(len(x), 4, 3, 3).square().mean()


def one_group(model, batch):
    x = batch[0]
    weight = own_weights(model, batch).transpose(0, 1).reshape(4, -1, 3, 3)
    return F.conv2d(x.reshape(1, -1, 5, 5), weight).square().mean()


@pytest.mark.parametrize("loss", [modulated, transposed, repeated, by_channel])
def test_convolutions_with_a_group_for_each_sample_are_proved(loss):
    found = found_in(job_with(loss, batch=images, model=Kernels))
    assert found.is_proved, found.sentence


@pytest.mark.parametrize("loss", [in_pairs, channels_first, weights_of_others, one_group])
def test_groups_in_which_samples_meet_are_not(loss):
    assert not found_in(job_with(loss, batch=images, model=Kernels)).is_proved


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(11, 6, mode="sum")


def words(size):
    return torch.randint(0, 11, (size, 3)), torch.randn(size, 6)


def bags(begins):
    def loss(model, batch):
        ids, targets = batch
        offsets = begins(torch.arange(len(ids)))
        return (model.table(ids.flatten(), offsets) - targets).square().mean()

    return loss


def test_offsets_that_are_multiples_of_positions_are_proved():
    found = found_in(job_with(bags(lambda at: at * 3), batch=words, model=Bags))
    assert found.is_proved, found.sentence


@pytest.mark.parametrize(
    "begins",
    [
        lambda at: at * 2,
        lambda at: at * 1,
        lambda at: at * at,
        lambda at: (at * 1.5).long(),
        lambda at: at * 3 // 2 * 2,
        lambda at: at * (len(at) // 2),
    ],
)
def test_offsets_that_lie_elsewhere_are_not(begins):
    assert not found_in(job_with(bags(begins), batch=words, model=Bags)).is_proved


def test_multiples_of_positions_are_still_positions():
    def loss(model, batch):
        x, y = batch
        return (model(x + torch.arange(len(x))[:, None] * 2) - y).square().mean()

    assert found_in(job_with(loss)).is_refuted


def kept_where_large(keep, take=lambda kept: kept):
    """Return a loss whose hooks on saved tensors leave small ones as they are."""

    def pack(tensor):
        return (keep(tensor),) if tensor.numel() >= 40 else tensor

    def unpack(kept):
        return take(kept[0]) if isinstance(kept, tuple) else kept

    def loss(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (model(batch[0]).tanh() - batch[1]).square().mean()

    return loss


def as_save_on_cpu(tensor):
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor.detach().clone(),
        lambda tensor: tensor.to("cpu", copy=True),
        as_save_on_cpu,
    ],
)
def test_hooks_that_keep_what_is_large_elsewhere_are_proved(keep):
    found = found_in(job_with(kept_where_large(keep)))
    assert found.is_proved, found.sentence


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor.half(),
        lambda tensor: tensor * 2,
        lambda tensor: as_save_on_cpu(tensor).zero_(),
        lambda tensor: torch.empty(tensor.size(), dtype=torch.half).copy_(tensor),
        lambda tensor: torch.empty(tensor.size()).copy_(tensor[:1]),
    ],
)
def test_hooks_that_keep_something_else_of_what_is_large_are_not(keep):
    loss = kept_where_large(keep, lambda kept: kept.float())
    assert not found_in(job_with(loss)).is_proved
