"""Loops over samples are proved where every round does the same, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.separation.linear_jobs import found_in, job_with
from torch import nn

from memfit import Total
from memfit.analysis.separability import Outcome

NUM_SAMPLES = 8


def error_of(model, batch, index):
    return (model(batch[0][index]) - batch[1][index]).square().mean()


def stacked(model, batch):
    return torch.stack([error_of(model, batch, i) for i in range(len(batch[0]))]).mean()


def pairwise_zip(model, batch):
    losses = [F.smooth_l1_loss(model(x), y) for x, y in zip(*batch, strict=True)]
    return sum(losses) / len(losses)


def added_in_place(model, batch):
    total = torch.zeros(())
    for i in range(len(batch[0])):
        total += error_of(model, batch, i)
    return total / len(batch[0])


def added_from_nothing(model, batch):
    total = None
    for i in range(len(batch[0])):
        error = error_of(model, batch, i) / len(batch[0])
        total = error if total is None else total + error
    return total


def over_representations(model, batch):
    hidden = model(batch[0]).tanh()
    losses = [(row.softmax(0) * target).sum() for row, target in zip(hidden, batch[1], strict=True)]
    return torch.stack(losses).mean()


def sliced_representations(model, batch):
    hidden = model(batch[0])
    found = [hidden[i : i + 1] * hidden[i : i + 1].std() for i in range(len(hidden))]
    return (torch.cat(found) - batch[1]).square().mean()


def used_twice(model, batch):
    def loss_of(x):
        return model(model(x).relu()).square().sum() + model.weight.square().sum()

    return torch.stack([loss_of(x) for x in batch[0].unbind()]).mean()


def in_place_within(model, batch):
    hidden = [F.relu(model(x) * 1.0, inplace=True) for x in batch[0]]
    return (torch.stack(hidden) - batch[1]).square().mean()


def beside_the_batch(model, batch):
    return stacked(model, batch) + (model(batch[0]) - batch[1]).abs().mean()


def with_a_total(model, batch):
    return Total(sum(error_of(model, batch, i) for i in range(len(batch[0]))), len(batch[0]))


def two_loops(model, batch):
    hidden = torch.stack([model(x) for x in batch[0]])
    return sum((row - y).square().mean() for row, y in zip(hidden, batch[1], strict=True)) / len(
        hidden
    )


ALIKE = {
    each.__name__: each
    for each in (
        stacked, pairwise_zip, added_in_place, added_from_nothing, over_representations,
        sliced_representations, used_twice, in_place_within, beside_the_batch, with_a_total, two_loops,
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_loops_that_do_the_same_for_each_sample_are_proved(name):
    found = found_in(job_with(ALIKE[name]))
    assert found.outcome is Outcome.PROVED, found.sentence


def looks_back(model, batch):
    hidden = model(batch[0])
    return torch.stack([(hidden[i] * hidden[i - 1]).mean() for i in range(len(hidden))]).mean()


def looks_back_in_order(model, batch):
    state, losses = torch.zeros(6), []
    for x in batch[0]:
        state = torch.tanh(model(x) + state)
        losses.append(state.square().mean())
    return torch.stack(losses).mean()


def without_the_last(model, batch):
    num = len(batch[0])
    return torch.stack([error_of(model, batch, i) for i in range(num - 1)]).sum() / num


def without_the_last_in_place(model, batch):
    total = torch.zeros(())
    for i in range(len(batch[0]) - 1):
        total += error_of(model, batch, i)
    return total / len(batch[0]) + 0 * sum(error_of(model, batch, i) for i in range(len(batch[0])))


def weighted_by_place(model, batch):
    return sum((i + 1) * error_of(model, batch, i) for i in range(len(batch[0]))) / 100


def weighted_by_positions(model, batch):
    weights = torch.arange(len(batch[0])).float()
    return sum(w * error_of(model, batch, i) for i, w in enumerate(weights)) / len(batch[0])


def other_for_the_first(model, batch):
    losses = [error_of(model, batch, i) for i in range(len(batch[0]))]
    losses[0] = losses[0].sqrt()
    return torch.stack(losses).mean()


def squared_sum(model, batch):
    return (sum(error_of(model, batch, i) for i in range(len(batch[0]))) / len(batch[0])).square()


def sum_of_all(model, batch):
    return sum(error_of(model, batch, i) for i in range(len(batch[0])))


def one_of_them(model, batch):
    return torch.stack([error_of(model, batch, i) for i in range(len(batch[0]))])[0]


def first_of_them(model, batch):
    losses = [error_of(model, batch, i) for i in range(len(batch[0]))]
    return losses[0]


def hardest(model, batch):
    losses = [error_of(model, batch, i) for i in range(len(batch[0]))]
    worst = losses[0]
    for each in losses[1:]:
        worst = torch.maximum(worst, each)
    return worst


def in_reverse(model, batch):
    hidden = torch.stack([model(x) for x in batch[0]][::-1])
    return (hidden - batch[1]).square().mean()


def against_another_target(model, batch):
    num = len(batch[0])
    return (
        sum((model(batch[0][i]) - batch[1][num - 1 - i]).square().mean() for i in range(num)) / num
    )


def counted_twice(model, batch):
    losses = [error_of(model, batch, i) for i in range(len(batch[0]))]
    return (sum(losses) + losses[0]) / len(losses)


def less_the_mean(model, batch):
    hidden = model(batch[0])
    mean = hidden.mean(0)
    return torch.stack([(row - mean).square().mean() for row in hidden]).mean()


def against_the_batch(model, batch):
    hidden = model(batch[0])
    return torch.stack([torch.logsumexp(hidden @ row, 0) for row in hidden]).mean()


def kept_within(model, batch):
    shared, losses = torch.zeros(6), []
    for x in batch[0]:
        shared.add_(1.0)
        losses.append((model(x) * shared.clone()).square().mean())
    return torch.stack(losses).mean()


def written_later(model, batch):
    hidden = model(batch[0]).detach()
    kept = list(hidden)
    hidden.sub_(hidden.mean(0))
    return torch.stack([(model(x) * k).mean() for x, k in zip(batch[0], kept, strict=True)]).mean()


def written_to_the_batch(model, batch):
    hidden = model(batch[0]).detach()
    losses = []
    for row, x in zip(hidden, batch[0], strict=True):
        row.mul_(hidden.mean())
        losses.append((model(x) * row.clone()).mean())
    return torch.stack(losses).mean()


def in_place_for_the_first(model, batch):
    hidden = [model(x) * 1.0 for x in batch[0]]
    hidden[0].mul_(2.0)
    return (torch.stack(hidden) - batch[1]).square().mean()


def view_of_what_is_written(model, batch):
    total = 0.0
    for x in batch[0]:
        row = x * 2.0
        half = row[:3]
        row.add_(batch[0][0].sum())
        total = total + (model(x)[:3] * half).mean()
    return total / len(batch[0])


def first_through_memory(model, batch):
    rows_ = [x.as_strided((6,), (1,), 0) * x for x in batch[0]]
    return torch.stack([model(row).square().mean() for row in rows_]).mean()


def columns_by_place(model, batch):
    hidden = model(batch[0])
    return torch.stack([hidden[i, i % 6] for i in range(len(hidden))]).mean()


def rows_of_a_table(model, batch):
    return sum(
        (model(batch[0][i]) * model.weight[i % 6]).mean() for i in range(len(batch[0]))
    ) / len(batch[0])


def gradient_by_the_batch_size(model, batch):
    losses = []
    for x in batch[0]:
        hidden = F.layer_norm(model(x), (6,)) * 1.0
        hidden.register_hook(lambda gradient: gradient * len(batch[0]))
        losses.append(F.gelu(hidden).square().mean())
    return torch.stack(losses).mean()


def drawn_once_each(model, batch):
    losses = [(model(x) * torch.rand(1)).square().mean() for x in batch[0]]
    return torch.stack(losses).mean()


def mixed_order_of_gradients(model, batch):
    hidden = model(batch[0])
    return sum((hidden[i] * hidden[-1 - i]).mean() for i in range(len(hidden))) / len(hidden)


def weights_that_are(numbers):
    """Weight each sample's error by numbers that a loop makes of the batch, without gradients."""

    def loss(model, batch):
        errors = (model(batch[0]) - batch[1]).square().mean(1)
        return (errors * numbers(list(batch[1]))).mean()

    return loss


def scaled_by_a_sum(numbers):
    """Add numbers that a loop makes of the batch; they have no gradients."""

    def loss(model, batch):
        error = (model(batch[0]) - batch[1]).square().mean()
        return error + numbers([row.mean() for row in batch[1]]) / len(batch[1])

    return loss


ALIKE |= {
    "weights of each sample": weights_that_are(lambda y: torch.stack([row.sum() for row in y])),
    "a sum without gradients": scaled_by_a_sum(sum),
}
COUPLED = {
    "weights in reverse": weights_that_are(lambda y: torch.stack([r.sum() for r in y[::-1]])),
    "weights in reverse but for the first": weights_that_are(
        lambda y: torch.stack([r.sum() for r in (y[0], *y[:0:-1])])
    ),
    "other weights for the first": weights_that_are(
        lambda y: torch.stack([y[0].exp().sum(), *(row.sum() for row in y[1:])])
    ),
    "all weights through memory": weights_that_are(
        lambda y: torch.stack([row.as_strided((6,), (1,), 0).sum() for row in y])
    ),
    "a sum with one term twice": scaled_by_a_sum(lambda y: sum(y[1:], y[0] + y[0])),
    "a sum with one term instead of another": scaled_by_a_sum(lambda y: sum(y[2:], y[0] + y[0])),
    "a sum of two kinds of terms": scaled_by_a_sum(lambda y: sum(y[1:], y[0].exp())),
}  # fmt: skip
COUPLED |= {
    each.__name__: each
    for each in (
        looks_back, looks_back_in_order, without_the_last, without_the_last_in_place,
        weighted_by_place, weighted_by_positions, other_for_the_first, squared_sum, sum_of_all,
        one_of_them, first_of_them, hardest, in_reverse, against_another_target, counted_twice, less_the_mean,
        against_the_batch, kept_within, written_later, first_through_memory, in_place_for_the_first,
        written_to_the_batch, view_of_what_is_written, columns_by_place,
        rows_of_a_table, gradient_by_the_batch_size, drawn_once_each, mixed_order_of_gradients,
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_loops_in_which_samples_meet_or_differ_are_never_proved(name):
    found = found_in(job_with(COUPLED[name]))
    assert not found.is_proved
    assert found.sentence.endswith(".")


@pytest.mark.slow
def test_a_loop_that_could_not_be_followed_is_not_known_and_named():
    found = found_in(job_with(weighted_by_place))
    assert found.outcome is Outcome.NOT_KNOWN
    assert "a loop over the samples" in found.sentence
    assert "separation/test_loops.py:" in found.sentence


def test_a_branch_on_the_length_of_the_batch_stays_refuted():
    def loss(model, batch):
        error = (model(batch[0]) - batch[1]).square().mean()
        return error * 2.0 if len(batch[0]) > 4 else error

    found = found_in(job_with(loss))
    assert found.is_refuted
    assert "does something else" in found.sentence


def test_a_loop_of_a_fixed_length_behind_a_branch_stays_refuted():
    def loss(model, batch):
        error = (model(batch[0]) - batch[1]).square().mean()
        for _ in range(NUM_SAMPLES - 2 if len(batch[0]) > 4 else 0):
            error = error * 1.1
        return error

    assert found_in(job_with(loss)).is_refuted


@pytest.mark.slow
def test_a_sum_over_a_loop_is_no_mean():
    found = found_in(job_with(sum_of_all))
    assert found.is_refuted
    assert "sum over samples" in found.sentence


@pytest.mark.slow
def test_a_buffer_that_adds_up_samples_in_a_loop_is_not_proved():
    def with_memory():
        model = nn.Linear(6, 6)
        model.register_buffer("seen", torch.zeros(6))
        return model

    def loss(model, batch):
        for x in batch[0]:
            model.seen.add_(x)
        return stacked(model, batch)

    assert not found_in(job_with(loss, model=with_memory)).is_proved


@pytest.mark.slow
def test_a_count_that_a_loop_leaves_incomplete_is_not_proved():
    def loss(model, batch):
        count = torch.zeros(())
        for x in batch[0][:-1]:
            count += (x.sum() * 0 + 1).detach()
        return Total(sum(error_of(model, batch, i) for i in range(len(batch[0]))), count)

    assert not found_in(job_with(loss)).is_proved
