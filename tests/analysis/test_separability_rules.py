"""What the walk says of torch's operators holds for numbers; what could fool it does not."""

from __future__ import annotations

import faulthandler
import json
import os
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.analysis.separability_oracle import Leaf, compared, torch_operators
from tests.conformance import builders
from torch import nn

from memfit import Job
from memfit.analysis.flow import Axis
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout

NUM_PARTS = 6
SAMPLE = (
    "add", "mul", "div", "pow", "where", "sum", "mean", "amax", "softmax", "cumsum", "sort", "topk",
    "gather", "scatter_add", "index_select", "index_put", "matmul", "addmm", "cat", "roll",
    "nn.functional.layer_norm", "nn.functional.conv2d", "nn.functional.avg_pool2d",
    "nn.functional.max_pool2d", "nn.functional.batch_norm", "nn.functional.embedding", "nn.functional.cross_entropy",
    "renorm", "nn.functional.grid_sample", "cdist",
)  # fmt: skip
CUTS = (
    ((0, 1), (2, 3), (4, 5)),
    ((0, 5, 1), (2, 4, 3)),
    ((0,), (1,), (2,)),
)


def tensors_of(value, found):
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            tensors_of(each, found)
    elif isinstance(value, dict):
        tensors_of(list(value.values()), found)
    return found


def with_tensors(value, tensors):
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(each, tensors) for each in value)
    if isinstance(value, dict):
        return {key: with_tensors(each, tensors) for key, each in value.items()}
    return value


def shuffled(tensor, generator):
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.detach().reshape(-1)[order].view(tensor.shape)


def leaf_of(tensor, dim, size, chance):
    """Make a leaf of several shuffled copies of a tensor, one for each sample."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    is_free = chance.random() < 0.25 or not -tensor.dim() <= dim < tensor.dim()
    if tensor.layout is not torch.strided or is_free or not tensor.shape[dim]:
        return Leaf(tensor.detach().clone())
    dim, outer = dim % tensor.dim(), chance.choice((1, 1, 2))
    copies = [shuffled(tensor, generator) for _ in range(size * outer)]
    return Leaf(torch.cat(copies, dim), dim, Axis(outer, tensor.shape[dim]))


def verdicts(operator, num_samples, num_layouts, seed=0):
    """Try an operator, forward and backward, on torch's sample inputs in several layouts."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    inputs = list(operator.sample_inputs("cpu", torch.float64))
    for given in chance.sample(inputs, min(num_samples, len(inputs))):
        parts = (given.input, given.args, given.kwargs)
        for _ in range(num_layouts):
            cuts, dim = chance.choice(CUTS), chance.choice((0, 0, 1, -1, -2))
            size = sum(map(len, cuts))
            leaves = [leaf_of(each, dim, size, chance) for each in tensors_of(parts, [])]
            for leaf in leaves:
                leaf.tensor.requires_grad_(leaf.tensor.is_floating_point())
            if any(leaf.axis for leaf in leaves):
                yield from verdict_of(operator, parts, leaves, cuts)


def verdict_of(operator, parts, leaves, cuts):
    def step(*tensors):
        first, args, named = with_tensors(parts, iter(tensors))
        outs = tensors_of(operator.op(first, *args, **named), [])
        terms = [out.square().mean() for out in outs if out.requires_grad]
        if terms:
            sum(terms).backward()

    try:
        yield compared(step, leaves, cuts)
    except (RuntimeError, ValueError, IndexError):
        return  # the operator takes no such shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_what_is_said_of_an_operator_is_true_of_numbers(name):
    operators = [each for each in torch_operators() if each.name == name]
    found = [each for one in operators[:1] for each in verdicts(one, 3, 3)]
    assert found
    assert [false for verdict in found for false in verdict.false] == []


NOT_TRIED = {
    # What they give is what lay in memory, or a packed form.
    "lu_unpack", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
    "linalg.matrix_rank",
    # Whole and pieces are rounded otherwise, far above what double precision allows.
    "bfloat16", "half", "chalf", "pinverse",
}  # fmt: skip


def claims_in_a_child(operator):
    """Try an operator in a process of its own: some of torch's end it when given odd shapes.

    Gives how many claims were made, and those that are false; nothing of a process that ended.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        faulthandler.disable()
        with os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            with (
                suppress(NotImplementedError, AssertionError, TypeError),
                os.fdopen(writer, "w") as file,
            ):
                found = [*verdicts(operator, 3, 3)]  # others have no samples in double precision
                false = [str(each) for verdict in found for each in verdict.false]
                json.dump([sum(verdict.num_claims for verdict in found), false], file)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    os.waitpid(child, 0)
    return json.loads(told) if told else [0, []]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of torch about its own operators
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_what_is_said_of_all_operators_is_true_of_numbers(part):
    """A third of them at a time, another in each run: the seed of pytest-randomly chooses."""
    false, num_claims = [], 0
    operators = torch_operators()
    random.shuffle(operators)
    for operator in operators[part : len(operators) // 3 : NUM_PARTS]:
        if operator.name.startswith(("_refs", "jiterator", "signal")) or operator.name in NOT_TRIED:
            continue
        count, of_operator = claims_in_a_child(operator)
        num_claims += count
        false += [f"{operator.name}: {each}" for each in of_operator]
    assert num_claims > 1000 / NUM_PARTS / 6
    assert false == []


def rows(size):
    return torch.randn(size, 6), torch.randn(size, 6)


def judged(loss, batch=rows, model=lambda: nn.Linear(6, 6)):
    job = Job(model=model, batch=batch, loss=loss, optimizer=builders.sgd, batch_size=16)
    return Separation(job, find_layout(job)).of(4)


def mse(one, other):
    return (one - other).square().mean()


def two_layouts_in_one_buffer(model, batch):
    size, hidden = len(batch[0]), model(batch[0])
    buffer = torch.empty(2 * size, 2)
    buffer[:, 0] = torch.cat([hidden[:, 0], batch[1][:, 0]])
    buffer[:, 1] = hidden[:, 1].repeat_interleave(2)
    return buffer.prod(1).mean()


def halves_of_different_scale(model, batch):
    size, hidden = len(batch[0]), model(batch[0])
    buffer = torch.zeros(2 * size, 6)
    buffer[:size] = hidden
    buffer[size:] = hidden / size
    return (buffer[size:] * size).abs().sqrt().mean()


def copied_positions(model, batch):
    places = torch.zeros(len(batch[0]), 2)
    places[:, 0] = torch.arange(len(batch[0])).float()
    return (model(batch[0])[:, :2] * places).mean()


def half_written_positions(model, batch):
    places = torch.arange(len(batch[0]))[:, None].expand(-1, 2).clone()
    places[:, 0] = batch[0][:, 0].long()
    return (model(batch[0])[:, :2] * places).mean()


def number_changed_later(model, batch):
    term = torch.tensor(1.0)
    loss = mse(model(batch[0]), batch[1]) * len(batch[0]) + term
    term.zero_()
    return loss / len(batch[0])


def large_constant(model, batch):
    numbers = torch.from_numpy(np.full((100, 6), float(len(batch[0]))))
    return (model(batch[0]).square().mean(0)[None] * numbers).mean()


def constants_in_part_of_a_buffer(model, batch):
    buffer = torch.ones(4 * len(batch[0]), 6)
    buffer[: 2 * len(batch[0])] = 0
    return (buffer.view(len(batch[0]), 4, 6)[:, 0] * model(batch[0])).mean()


def noise_scaled_in_part_of_a_buffer(model, batch):
    buffer = torch.randn(4 * len(batch[0]), 6)
    buffer[: 2 * len(batch[0])] *= 0.1
    return (buffer.view(len(batch[0]), 4, 6)[:, 0] * model(batch[0])).mean()


def constants_behind_one_another(model, batch):
    size = len(batch[0])
    buffer = torch.cat([torch.ones(2 * size, 6), torch.zeros(2 * size, 6)])
    return (buffer.view(size, 4, 6)[:, 0] * model(batch[0])).mean()


def constants_across_a_buffer(model, batch):
    buffer = torch.ones(len(batch[0]), 6)
    buffer.view(6, -1)[:3] = 0
    return (buffer * model(batch[0])).mean()


def samples_across_a_buffer(model, batch):
    buffer = torch.zeros(len(batch[0]), 6)
    buffer.view(6, -1)[0] = model(batch[0])[:, 0]
    return (buffer * model(batch[0])).mean()


def by_place_in_the_batch(numbers):
    """Weight samples by constants of their rows, laid out across the rows."""

    def loss(model, batch):
        size = len(batch[0])
        weights = numbers(torch.ones(size, 6)).float().reshape(6, size)[0]
        return (weights * model(batch[0]).mean(1)).mean()

    return loss


COUPLED = {
    **{
        f"equal numbers by their places: {name}": by_place_in_the_batch(numbers)
        for name, numbers in {
            "cumsum": lambda x: x.cumsum(1), "cumprod": lambda x: (2 * x).cumprod(1),
            "logcumsumexp": lambda x: x.logcumsumexp(1), "argsort": lambda x: x.argsort(1),
            "sort": lambda x: x.sort(1).indices, "topk": lambda x: x.topk(6, 1).indices,
            "cummax": lambda x: x.cummax(1).indices,
        }.items()
    },
    "constants in part of a buffer": constants_in_part_of_a_buffer,
    "noise scaled in part of a buffer": noise_scaled_in_part_of_a_buffer,
    "constants behind one another": constants_behind_one_another,
    "constants across a buffer": constants_across_a_buffer,
    "samples across a buffer": samples_across_a_buffer,
    "a shift that is half the batch": lambda m, b: mse(m(b[0]), b[1].roll(len(b[0]) // 2, 1)),
    "a column by the batch size": lambda m, b: mse(m(b[0])[:, len(b[0]) // 8], b[1][:, 0]),
    "columns by the batch size": lambda m, b: m(b[0])[:, len(b[0]) // 8 :][:, :2].mean(),
    "a bound by the batch size": lambda m, b: m(b[0]).clamp(max=len(b[0]) / 8).mean(),
    "a power by the batch size": lambda m, b: (m(b[0]).abs() + 1).pow(len(b[0]) / 16).mean(),
    "a rate by the batch size": lambda m, b: F.dropout(m(b[0]), 1 / len(b[0])).mean(),
    "a norm by the batch size": lambda m, b: m(b[0]).norm(p=2.0 + len(b[0]), dim=1).mean(),
    "counting by cumsum": lambda m, b: (m(b[0]).mean(1) * torch.ones(len(b[0])).cumsum(0)).mean(),
    "positions after a sum": lambda m, b: (
        m(b[0]).mean(1) * torch.arange(len(b[0]))[:, None].sum(1)
    ).mean(),
    "positions copied": copied_positions,
    "positions half overwritten": half_written_positions,
    "numbers over the batch": lambda m, b: (
        m(b[0]).mean(1) * torch.linspace(0, 1, len(b[0]))
    ).mean(),
    "two layouts in one buffer": two_layouts_in_one_buffer,
    "halves of different scale": halves_of_different_scale,
    "a number changed later": number_changed_later,
    "a large constant by the batch size": large_constant,
    "a rounded mean": lambda m, b: mse(m(b[0]), b[1]) + m(b[0]).mean(0).long().float().mean(),
    "a sum with added constants": lambda m, b: F.pad(m(b[0]).mean(0), (0, 2), value=1.0).mean(),
    "norms over the batch": lambda m, b: m(b[0]).renorm(2, 1, 1.0).mean(),
    "the batch as boundaries": lambda m, b: (
        m(b[0]).mean(1) * torch.bucketize(b[0][:, 0], b[1][:, 0])
    ).mean(),
    "planes made of samples": lambda m, b: F.avg_pool2d(m(b[0]).view(1, -1, 6), 2).square().mean(),
    "samples written in reverse": lambda m, b: b[0].clone().copy_(m(b[0]).flip(0)).prod(1).mean(),
    "tiny products of samples": lambda m, b: mse(m(b[0]), b[1])
    + 1e-9 * (m(b[0]) @ m(b[0]).T).mean(),
}  # fmt: skip


@pytest.mark.parametrize("what", COUPLED)
def test_what_couples_samples_is_never_proved(what):
    assert not judged(COUPLED[what]).is_proved


def test_the_rows_of_a_square_tensor_are_not_taken_for_its_columns():
    def squares(size):
        return torch.randn(size, size), torch.randn(size, 6)

    found = judged(lambda m, b: (b[0].sum(1) * m(b[1]).mean(1)).mean(), squares)
    assert not found.is_proved


@pytest.mark.slow
def test_a_layer_computed_in_another_way_for_one_sample_is_not_known_to_couple():
    job = Job(
        model=lambda: nn.GRU(6, 6, 1),
        batch=lambda size: (torch.randn(3, size, 6),),
        loss=lambda m, b: m(b[0])[0].square().mean(),
        optimizer=builders.sgd,
        batch_size=4,
    )
    separation = Separation(job, find_layout(job))
    assert separation.of(2).is_proved
    assert not separation.of(1).is_refuted


def test_a_number_in_the_batch_stays_that_of_the_whole_batch():
    def counted(size):
        return *rows(size), size

    found = judged(lambda m, b: (m(b[0]) - b[1]).square().sum() / b[2], counted)
    assert found.is_refuted


def test_a_tensor_kept_between_steps_and_written_from_the_batch_is_named():
    def with_memory():
        model = nn.Linear(6, 6)
        model.memory = torch.zeros(6)
        return model

    def loss(model, batch):
        model.memory.add_(batch[0].sum(0))
        return mse(model(batch[0]), batch[1])

    found = judged(loss, model=with_memory)
    assert found.is_refuted
    assert "outlives" in found.sentence


def columns_of_a_buffer(model, batch):
    buffer = torch.ones(len(batch[0]), 6)
    buffer[:, 1:3] = 0
    buffer.t()[5:] = 2
    buffer[:, 0] = model(batch[0])[:, 0].detach()
    return (buffer * model(batch[0])).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        columns_of_a_buffer,
        lambda m, b: mse(m(b[0]), b[1]),
        lambda m, b: mse(torch.sinc(m(b[0])), b[1]),
        lambda m, b: m(b[0]).renorm(2, 0, 1.0).mean(),
        lambda m, b: -m(b[0]).log_softmax(1)[torch.arange(len(b[0])), b[1].argmax(1)].mean(),
    ],
)
def test_means_over_samples_are_proved(loss):
    assert judged(loss).is_proved
