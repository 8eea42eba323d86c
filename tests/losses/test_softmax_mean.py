"""The streamed softmax-mean equals the computation at once, in value, gradient and random draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import JobError, MemfitWarning
from memfit.losses import SoftmaxMean, chunked, noted_losses, softmax_mean, softmax_mean_of_parts
from memfit.observe.allocator_events import AllocatorWatch
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching

NUM_MEMBERS, NUM_SAMPLES, NUM_FEATURES = 11, 6, 4
CHUNKS = (None, 1, 2, 3, 5, 10, 11, 40)


class Pairs(nn.Module):
    """What the tests stream: a network per member, and terms of members and samples."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES, 8)
        self.outer = nn.Linear(8, NUM_FEATURES)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.drop = nn.Dropout(dropout)
        self.double()

    def prepare(self, members: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(torch.tanh(self.inner(members)))
        return members, self.outer(hidden)

    def terms(self, members: Tensor, encoded: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        weight = samples @ encoded.T * self.temperature
        shift = samples[:, None] - members[None]
        return weight, shift.square() + encoded[None], torch.sin(shift.sum(2))


def make(dropout: float = 0.0, seed: int = 0) -> tuple[Pairs, Tensor, Tensor]:
    torch.manual_seed(seed)
    pairs = Pairs(dropout)
    members = torch.randn(NUM_MEMBERS, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    samples = torch.randn(NUM_SAMPLES, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    return pairs, members, samples


def loss_of(mean: SoftmaxMean) -> Tensor:
    """Take a loss that depends on everything, not linearly."""
    wide, narrow = mean.means
    return (mean.log_sum_exp.square() + wide.exp().sum(1) * narrow + narrow.cos()).mean()


def loss_of_terms(weight: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """Write the definition down."""
    share = torch.softmax(weight, 1)
    wide = torch.einsum("bk,bkm->bm", share, wide)
    return loss_of(SoftmaxMean(torch.logsumexp(weight, 1), (wide, (share * narrow).sum(1))))


def direct(pairs: Pairs, members: Tensor, samples: Tensor) -> Tensor:
    return loss_of_terms(*pairs.terms(*pairs.prepare(members), samples))


def streamed(pairs: Pairs, members: Tensor, samples: Tensor, **how: object) -> Tensor:
    return loss_of(softmax_mean(pairs.terms, (members,), (samples,), prepare=pairs.prepare, **how))


def gradients(loss: Tensor, pairs: Pairs, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*pairs.parameters(), *tensors]))


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], most: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= most


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, 1, 4, 6])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_value_and_gradients_are_those_of_the_definition(chunk, tile):
    pairs, *tensors = make()
    expected = direct(pairs, *tensors)
    found = streamed(pairs, *tensors, chunk=chunk, tile=tile)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    assert_equal(gradients(found, pairs, *tensors), gradients(expected, pairs, *tensors))


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_random_draws_are_the_same_in_both_passes(chunk):
    pairs, members, samples = make(dropout=0.5)
    torch.manual_seed(3)
    found = gradients(streamed(pairs, members, samples, chunk=chunk), pairs, members, samples)
    after = torch.rand(3)
    torch.manual_seed(3)
    prepared = [pairs.prepare(part) for part in members.split(chunk)]
    whole = [torch.cat(each) for each in zip(*prepared, strict=True)]
    expected = loss_of_terms(*pairs.terms(*whole, samples))
    assert_equal(found, gradients(expected, pairs, members, samples))
    assert torch.equal(after, torch.rand(3)), "backward must leave the random state as it was"


def test_log_weights_of_any_size_do_not_overflow():
    members = torch.tensor([[-2000.0], [900.0], [901.0], [-1e30]])
    mean = softmax_mean(
        lambda m, x: (x @ m.T, m[None].expand(len(x), -1, -1)),
        (members,),
        (torch.ones(2, 1),),
        chunk=1,
    )
    expected = torch.logsumexp(members[:, 0], 0)
    assert torch.allclose(mean.log_sum_exp, expected.expand(2))
    assert mean.means[0].isfinite().all()


def test_members_without_weight_count_nothing():
    weight = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]], dtype=torch.float64)
    value = torch.tensor([[5.0, 1.0, 7.0, 3.0]], dtype=torch.float64)

    def terms(places: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:, places], value[:, places]

    for chunk in (1, 2, 3, 4):
        mean = softmax_mean(terms, (torch.arange(4),), (torch.zeros(1, 1),), chunk=chunk)
        share = torch.softmax(weight, 1)
        assert mean.means[0].item() == pytest.approx((share * value).sum().item(), rel=1e-14)


def test_parts_put_together_are_the_whole_set():
    pairs, members, samples = make()
    parts = [
        softmax_mean(pairs.terms, (part,), (samples,), prepare=pairs.prepare, chunk=2)
        for part in members.split((1, 7, 3))
    ]
    found = loss_of(softmax_mean_of_parts(parts))
    expected = direct(pairs, members, samples)
    assert_equal(
        gradients(found, pairs, members, samples), gradients(expected, pairs, members, samples)
    )


def test_tensors_that_were_computed_before_are_named_and_get_their_gradients():
    pairs, members, samples = make()
    scale = torch.ones(NUM_FEATURES, dtype=torch.float64, requires_grad=True)

    def run(how: Callable[[Callable[..., Sequence[Tensor]], Tensor], SoftmaxMean]) -> list[Tensor]:
        factor = scale.exp()
        found = how(lambda m: (m, pairs.prepare(m)[1] * factor), factor)
        return list(torch.autograd.grad(loss_of(found), [scale, *pairs.parameters()]))

    whole = run(
        lambda prepare, _: softmax_mean(pairs.terms, (members,), (samples,), prepare=prepare)
    )
    found = run(
        lambda prepare, factor: softmax_mean(
            pairs.terms, (members,), (samples,), prepare=prepare, parameters=(factor,), chunk=3
        )
    )
    assert_equal(found, whole)


def test_hooks_on_parameters_see_the_whole_gradient_once():
    pairs, members, samples = make()
    expected = gradients(direct(pairs, members, samples), pairs)
    seen: list[Tensor] = []
    finished: list[str] = []
    pairs.inner.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    pairs.inner.weight.register_post_accumulate_grad_hook(lambda _: finished.append("inner"))
    streamed(pairs, members, samples, chunk=2).backward()
    assert len(seen) == len(finished) == 1
    assert_equal([seen[0], pairs.inner.weight.grad], [expected[1], 2 * expected[1]])


def test_it_works_inside_of_checkpointing():
    pairs, members, samples = make(dropout=0.3)

    def run(inside: bool) -> list[Tensor]:
        torch.manual_seed(1)
        call = lambda m, s: streamed(pairs, m, s, chunk=3)  # noqa: E731
        loss = (
            checkpoint(call, members, samples, use_reentrant=False)
            if inside
            else call(members, samples)
        )
        return gradients(loss, pairs, members, samples)

    assert_equal(run(inside=True), run(inside=False))


def test_under_autocast_results_are_those_of_autocast_in_float32():
    pairs, members, samples = make()
    pairs.float()
    members, samples = members.detach().float(), samples.detach().float()

    def run(**how: int) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = streamed(pairs, members, samples, **how)
        return loss, gradients(loss, pairs)

    (whole, of_whole), (found, of_chunks) = run(), run(chunk=4)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(whole.item(), rel=1e-2)
    assert_equal(of_chunks, of_whole, most=0.03)
    exact = gradients(streamed(pairs, members, samples, chunk=4), pairs)
    with pytest.raises(AssertionError):
        assert_equal(of_chunks, exact, most=1e-5)


class Model(nn.Module):
    """A model whose members are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = Pairs()
        self.register_buffer("members", torch.randn(NUM_MEMBERS, NUM_FEATURES).double())


def job() -> memfit.Job:
    return memfit.Job(
        model=Model,
        batch=lambda size: torch.randn(size, NUM_FEATURES, dtype=torch.float64),
        loss=lambda model, batch: streamed(model.pairs, model.members, batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=7,
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4])
def test_plans_with_chunks_and_micro_batches_keep_the_results(chunk):
    strategies = (LossChunking(num_candidates=chunk), MicroBatching(micro_batch_size=3))
    verified = memfit.verify(job(), memfit.Plan(strategies=strategies))
    assert verified.largest_error <= 1e-12


def test_a_plan_sees_that_there_is_something_to_stream():
    with noted_losses() as notes:
        pairs, *tensors = make()
        streamed(pairs, *tensors)
    (note,) = notes
    assert (note.num_candidates, note.num_rows, note.smallest_chunk) == (
        NUM_MEMBERS,
        NUM_SAMPLES,
        1,
    )


@pytest.mark.slow
def test_the_chunk_size_around_it_is_taken_and_nothing_is_kept_for_the_other_members():
    def saved_bytes(num_members: int) -> int:
        pairs, _, samples = make()
        members = torch.randn(num_members, NUM_FEATURES, dtype=torch.float64)
        with AllocatorWatch() as watch, chunked(8):
            loss = streamed(pairs, members, samples)
            loss.backward()
        return watch.highest_growth_bytes()

    assert saved_bytes(400) <= 1.05 * saved_bytes(40)


def test_evaluation_without_gradients_is_streamed_as_well():
    pairs, members, samples = make()
    with torch.no_grad():
        found = streamed(pairs, members, samples, chunk=2)
    assert not found.requires_grad
    assert found.item() == pytest.approx(direct(pairs, members, samples).item(), rel=1e-13)


def test_a_second_derivative_is_refused():
    pairs, members, samples = make()
    loss = streamed(pairs, members, samples, chunk=2)
    with pytest.raises(JobError, match="differentiated again"):
        torch.autograd.grad(loss, members, create_graph=True)


def test_a_parameter_that_changed_in_between_is_refused():
    pairs, members, samples = make()
    loss = streamed(pairs, members, samples, chunk=2)
    with torch.no_grad():
        pairs.inner.weight.mul_(2)
    with pytest.raises(JobError, match="changed in place"):
        loss.backward()


def test_a_parameter_that_only_later_chunks_use_is_refused_and_not_forgotten():
    pairs, members, samples = make()
    late = nn.Parameter(torch.ones((), dtype=torch.float64))

    def prepare(part: Tensor) -> Sequence[Tensor]:
        first, second = pairs.prepare(part)
        return (first, second) if torch.equal(part[0], members[0]) else (first, second * late)

    with pytest.warns(MemfitWarning, match="could not be followed"):
        mean = softmax_mean(pairs.terms, (members,), (samples,), prepare=prepare, chunk=4)
    loss = loss_of(mean)
    with pytest.raises(JobError, match="the first chunk"):
        loss.backward()


@pytest.mark.parametrize(
    ("members", "inputs", "what"),
    [
        ((), (torch.zeros(2, 1),), "members of shapes none"),
        ((torch.zeros(0, 1),), (torch.zeros(2, 1),), "members"),
        ((torch.zeros(3, 1), torch.zeros(2, 1)), (torch.zeros(2, 1),), "members"),
        ((torch.zeros(3, 1),), (torch.zeros(()),), "inputs"),
    ],
)
def test_sets_and_inputs_without_a_common_extent_are_refused(members, inputs, what):
    with pytest.raises(JobError, match=what):
        softmax_mean(lambda *_: (torch.zeros(2, 3),), members, inputs, chunk=1)


@pytest.mark.parametrize("chunk", [0, -1, 1.5])
def test_chunks_of_no_usable_size_are_refused(chunk):
    pairs, *tensors = make()
    with pytest.raises(JobError, match="chunk size"):
        streamed(pairs, *tensors, chunk=chunk)
