"""The streamed losses equal the direct computation, and hold no rows x candidates buffer."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.losses.largest_tensor import LargestTensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.errors import JobError
from memfit.losses import StreamableLoss, chunk_size, chunked, noted_losses, one_to_many_bce

NUM_ROWS, NUM_CANDIDATES, NUM_FEATURES = 5, 13, 4
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def make_inputs(
    num_rows: int = NUM_ROWS,
    num_candidates: int = NUM_CANDIDATES,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make query, candidates, bias and positives with padding and a candidate listed twice."""
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(num_rows, NUM_FEATURES, generator=generator, dtype=torch.float64)
    candidates = torch.randn(num_candidates, NUM_FEATURES, generator=generator, dtype=torch.float64)
    bias = torch.randn(num_candidates, generator=generator, dtype=torch.float64)
    positives = torch.randint(-1, num_candidates, (num_rows, 6), generator=generator)
    positives[:, 5] = positives[:, 0]
    positives[0] = -1
    floats = [x.to(dtype).requires_grad_() for x in (query, candidates, bias)]
    return floats[0], floats[1], floats[2], positives


def loss_of(inputs: Sequence[Tensor], positives: Tensor, **settings: Any) -> Tensor:
    """Call the loss with query, candidates and bias from a sequence."""
    query, candidates, bias = inputs
    return one_to_many_bce(query, candidates, bias, positives, **settings)


def direct_loss(inputs: Sequence[Tensor], positives: Tensor, label_smoothing: float) -> Tensor:
    """Write the definition down, with Python loops for the labels."""
    query, candidates, bias = inputs
    labels = torch.zeros(query.shape[0], candidates.shape[0], dtype=query.dtype)
    for row, listed in enumerate(positives.tolist()):
        for candidate in listed:
            if candidate >= 0:
                labels[row, candidate] = 1.0
    labels = (1 - label_smoothing) * labels + label_smoothing / candidates.shape[0]
    return F.binary_cross_entropy_with_logits(query @ candidates.T + bias, labels)


def loss_and_gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, NUM_CANDIDATES, NUM_CANDIDATES + 50])
def test_loss_and_gradients_equal_the_definition(chunk: int | None, label_smoothing: float) -> None:
    *inputs, positives = make_inputs()
    expected = loss_and_gradients(direct_loss(inputs, positives, label_smoothing), tuple(inputs))
    loss = loss_of(inputs, positives, label_smoothing=label_smoothing, chunk=chunk)
    for found, wanted in zip(loss_and_gradients(loss, tuple(inputs)), expected, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 6),
    num_candidates=st.integers(1, 20),
    chunk=st.integers(1, 25),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_streaming_never_changes_the_result(
    num_rows: int, num_candidates: int, chunk: int, label_smoothing: float, seed: int
) -> None:
    *inputs, positives = make_inputs(num_rows, num_candidates, seed=seed)
    whole = loss_of(inputs, positives, label_smoothing=label_smoothing)
    streamed = loss_of(inputs, positives, label_smoothing=label_smoothing, chunk=chunk)
    pairs = zip(
        loss_and_gradients(streamed, tuple(inputs)),
        loss_and_gradients(whole, tuple(inputs)),
        strict=True,
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_go_only_to_the_inputs_that_ask(needed: tuple[int, ...]) -> None:
    *inputs, positives = make_inputs()
    whole = torch.autograd.grad(loss_of(inputs, positives), inputs)
    asked = [x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs)]
    loss_of(asked, positives, chunk=3).backward()
    for i, x in enumerate(asked):
        assert (x.grad is not None) == (i in needed)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, whole[i], **EXACT)


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_loss_without_bias_equals_a_loss_with_zero_bias(chunk: int | None) -> None:
    query, candidates, bias, positives = make_inputs()
    zero = torch.zeros_like(bias)
    wanted = one_to_many_bce(query, candidates, zero, positives)
    found = one_to_many_bce(query, candidates, None, positives, chunk=chunk)
    torch.testing.assert_close(found, wanted, **EXACT)
    found.backward()
    assert query.grad is not None


def test_large_scores_give_finite_losses_and_gradients() -> None:
    *inputs, positives = make_inputs()
    large = [(200 * x).detach().requires_grad_() for x in inputs]
    wanted = loss_and_gradients(direct_loss(large, positives, 0.0), tuple(large))
    loss = loss_of(large, positives, chunk=3)
    for found, want in zip(loss_and_gradients(loss, tuple(large)), wanted, strict=True):
        torch.testing.assert_close(found, want, **EXACT)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_scored_in_float32(dtype: torch.dtype, chunk: int | None) -> None:
    *inputs, positives = make_inputs(dtype=dtype)
    raised = [x.detach().float().requires_grad_() for x in inputs]
    wanted = loss_and_gradients(loss_of(raised, positives), tuple(raised))
    found = loss_and_gradients(loss_of(inputs, positives, chunk=chunk), tuple(inputs))
    torch.testing.assert_close(found[0], wanted[0])
    assert found[0].dtype == torch.float32
    for gradient, want in zip(found[1:], wanted[1:], strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, want.to(dtype))


@pytest.mark.parametrize("chunk", [None, 4])
def test_autocast_does_not_lower_the_precision_of_the_scores(chunk: int | None) -> None:
    *inputs, positives = make_inputs(dtype=torch.float32)
    wanted = loss_and_gradients(loss_of(inputs, positives, chunk=chunk), tuple(inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(inputs, positives, chunk=chunk)
    for found, want in zip(loss_and_gradients(loss, tuple(inputs)), wanted, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize(("chunk", "fits"), [(10, True), (None, False)])
def test_only_streaming_holds_no_buffer_of_all_scores(chunk: int | None, fits: bool) -> None:
    num_rows, num_candidates = 50, 400
    *inputs, positives = make_inputs(num_rows, num_candidates)
    with LargestTensor() as largest:
        loss_of(inputs, positives, label_smoothing=0.1, chunk=chunk).backward()
    gradient_of_candidates = num_candidates * NUM_FEATURES
    assert (largest.num_elements <= gradient_of_candidates) == fits


def test_the_backward_pass_allocates_the_gradient_of_the_candidates_once() -> None:
    num_candidates = 400
    *inputs, positives = make_inputs(3, num_candidates)
    loss = loss_of(inputs, positives, chunk=num_candidates)
    own = {x.untyped_storage().data_ptr() for x in inputs}
    seen: set[int] = set()

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.numel() == num_candidates * NUM_FEATURES:
                    seen.add(leaf.untyped_storage().data_ptr())
            return result

    with Storages():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss.backward()
    assert len(seen - own) == 1


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_loss_can_be_recorded_on_fake_tensors(chunk: int | None) -> None:
    with FakeTensorMode() as mode:
        *inputs, positives = make_inputs_without_writes()
        fake = [mode.from_tensor(x) if not hasattr(x, "fake_mode") else x for x in inputs]
        loss = loss_of(fake, positives, label_smoothing=0.1, chunk=chunk)
        loss.backward()
    assert loss.shape == ()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in fake)


def make_inputs_without_writes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make inputs with no values, as a recorder does."""
    return (
        torch.empty(NUM_ROWS, NUM_FEATURES, requires_grad=True),
        torch.empty(NUM_CANDIDATES, NUM_FEATURES, requires_grad=True),
        torch.empty(NUM_CANDIDATES, requires_grad=True),
        torch.empty(NUM_ROWS, 6, dtype=torch.int64),
    )


def test_the_backward_pass_uses_the_chunk_size_of_its_forward_pass() -> None:
    *inputs, positives = make_inputs(50, 400)
    with chunked(10):
        loss = loss_of(inputs, positives)
    with LargestTensor() as largest:
        loss.backward()
    assert largest.num_elements <= 400 * NUM_FEATURES


def test_differentiating_the_gradients_again_is_refused() -> None:
    *inputs, positives = make_inputs()
    loss = loss_of(inputs, positives, chunk=3)
    with pytest.raises(JobError, match="differentiated again"):
        torch.autograd.grad(loss, inputs[:1], create_graph=True)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("index", [NUM_CANDIDATES, NUM_CANDIDATES + 3])
def test_a_positive_that_is_no_candidate_is_an_error(index: int, chunk: int | None) -> None:
    *inputs, positives = make_inputs()
    positives[2, 1] = index
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        loss_of(inputs, positives, chunk=chunk)


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(5, 3)},
        {"query": torch.zeros(5)},
        {"candidates": torch.zeros(0, 4)},
        {"bias": torch.zeros(12)},
        {"positives": torch.zeros(4, 6, dtype=torch.int64)},
        {"positives": torch.zeros(5, 6)},
    ],
)
def test_wrong_shapes_are_named_with_what_is_needed(change: dict[str, Tensor]) -> None:
    names = ("query", "candidates", "bias", "positives")
    inputs = dict(zip(names, make_inputs(), strict=True)) | change
    with pytest.raises(JobError, match=r"needed are query \(B, D\)"):
        one_to_many_bce(*inputs.values())


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0, float("nan")])
def test_an_unusable_smoothing_is_refused(label_smoothing: float) -> None:
    with pytest.raises(JobError, match="label_smoothing"):
        one_to_many_bce(*make_inputs(), label_smoothing=label_smoothing)


@pytest.mark.parametrize("chunk", [0, -1, 2.5])
def test_an_unusable_chunk_size_is_refused(chunk: int) -> None:
    with pytest.raises(JobError, match="chunk size"):
        one_to_many_bce(*make_inputs(), chunk=chunk)
    with pytest.raises(JobError, match="chunk size"), chunked(chunk):
        pass


def test_the_chunk_size_holds_inside_its_block_only() -> None:
    assert chunk_size() is None
    with chunked(8):
        with chunked(3):
            assert chunk_size() == 3
        assert chunk_size() == 8
    assert chunk_size() is None


def test_the_chunk_size_ends_with_its_block_also_after_an_error() -> None:
    with pytest.raises(KeyError), chunked(8):
        raise KeyError
    assert chunk_size() is None


def test_losses_are_noted_with_their_sizes_inside_the_block_only() -> None:
    *inputs, positives = make_inputs()
    note = StreamableLoss(name="one_to_many_bce", num_rows=NUM_ROWS, num_candidates=NUM_CANDIDATES)
    with noted_losses() as notes:
        loss_of(inputs, positives)
        loss_of(inputs, positives, chunk=2)
    loss_of(inputs, positives)
    assert notes == [note, note]
