"""Cross-entropy in chunks of rows equals the whole computation, and holds one chunk of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.losses.largest_tensor import LargestTensor

from memfit.errors import JobError
from memfit.losses import linear_cross_entropy
from memfit.losses.row_chunks import Chunking, Targets, row_chunks

NUM_ROWS, NUM_FEATURES, NUM_CLASSES = 13, 5, 11
IGNORED = 3


def make_inputs(dtype=torch.float64, *, has_bias=True):
    """Make hidden, weight, bias and labels, some of which are to be ignored."""
    hidden = 3 * torch.randn(NUM_ROWS, NUM_FEATURES, dtype=torch.float64)
    weight = torch.randn(NUM_CLASSES, NUM_FEATURES, dtype=torch.float64)
    bias = torch.randn(NUM_CLASSES, dtype=torch.float64)
    labels = torch.randint(0, NUM_CLASSES, (NUM_ROWS,))
    labels[2] = labels[7] = IGNORED
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)]
    return leaves if has_bias else leaves[:2], labels


def whole(leaves, labels, **settings):
    hidden, weight, *bias = leaves
    settings["weight"] = settings.pop("class_weight", None)
    return F.cross_entropy(F.linear(hidden, weight, *bias), labels, **settings)


def chunked(leaves, labels, **settings):
    hidden, weight, *bias = leaves
    return linear_cross_entropy(hidden, weight, labels, *bias, **settings)


def with_gradients(loss, leaves):
    """Return the loss and gradients that depend on each row's part in it."""
    factor = torch.linspace(-1.0, 2.0, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * factor).sum(), leaves)]


def assert_equal(found, expected, relative=1e-12):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=relative, atol=relative)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("class_weight", [None, "weighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, IGNORED])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_those_of_the_whole_computation(
    reduction, ignore_index, label_smoothing, class_weight, has_bias
):
    leaves, labels = make_inputs(has_bias=has_bias)
    settings = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "class_weight": class_weight and torch.rand(NUM_CLASSES, dtype=torch.float64),
    }
    expected = with_gradients(whole(leaves, labels, **settings), leaves)
    for num_rows in (1, 4, 6, NUM_ROWS, 50, None):
        loss = chunked(leaves, labels, **settings, num_rows=num_rows)
        assert_equal(with_gradients(loss, leaves), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weight", [None, "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_that_counts_gives_what_torch_gives(reduction, class_weight, label_smoothing):
    leaves, labels = make_inputs()
    settings = {
        "reduction": reduction,
        "ignore_index": IGNORED,
        "label_smoothing": label_smoothing,
        "class_weight": class_weight and torch.rand(NUM_CLASSES, dtype=torch.float64),
    }
    labels.fill_(IGNORED)
    found = with_gradients(chunked(leaves, labels, **settings, num_rows=4), leaves)
    expected = with_gradients(whole(leaves, labels, **settings), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_infinite_logits_of_ignored_rows_leave_the_loss_alone():
    leaves, labels = make_inputs()
    labels[0] = -100
    with torch.no_grad():
        leaves[0][0] = torch.inf
    assert torch.isfinite(chunked(leaves, labels, num_rows=4))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen, reduction):
    leaves, labels = make_inputs()
    leaves[frozen].requires_grad_(False)
    chunked(leaves, labels, num_rows=4, reduction=reduction).sum().backward()
    found = [each.grad for each in leaves]
    assert found[frozen] is None
    others = [each for each in leaves if each.requires_grad]
    expected = torch.autograd.grad(whole(leaves, labels, reduction=reduction).sum(), others)
    assert_equal([each for each in found if each is not None], expected)


def test_without_gradients_none_are_made():
    leaves, labels = make_inputs()
    with torch.no_grad():
        loss = chunked(leaves, labels)
    assert not loss.requires_grad
    assert_equal([loss], [whole(leaves, labels)])


def test_a_transposed_weight_gets_its_gradient():
    (hidden, weight, _), labels = make_inputs()
    stored = weight.detach().t().contiguous().requires_grad_()
    linear_cross_entropy(hidden, stored.t(), labels, num_rows=4).backward()
    expected = torch.autograd.grad(whole((hidden, weight), labels), weight)[0]
    torch.testing.assert_close(stored.grad, expected.t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_rounded_and_losses_are_not(dtype):
    leaves, labels = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        logits = F.linear(*leaves)
        found = chunked(leaves, labels, num_rows=4)
    expected = F.cross_entropy(logits.float(), labels)
    assert logits.dtype is dtype
    assert found.dtype is torch.float32
    assert_equal([found], [expected], relative=1e-6)
    gradients = torch.autograd.grad(found, leaves)
    assert {each.dtype for each in gradients} == {torch.float32}
    precision = torch.finfo(dtype).eps
    for one, other in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        assert (one - other).norm() < 2 * precision * other.norm()


def test_a_gradient_scaler_reaches_float16_before_anything_is_rounded():
    """Probabilities below what float16 can hold have gradients that a scaler saves."""
    hidden = torch.ones(64, 8, requires_grad=True)
    weight = torch.zeros(100, 8)
    weight[0] = 18.0 / 8  # the others have a probability of 1.5e-8
    weight.requires_grad_()
    labels = torch.zeros(64, dtype=torch.int64)
    scale = 2.0**16
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, labels, num_rows=16)
    found = torch.autograd.grad(loss * scale, weight)[0] / scale
    expected = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), labels), weight)[0]
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-2, atol=0)


def test_bfloat16_parameters_have_their_gradients_added_up_in_float32():
    leaves, labels = make_inputs(torch.bfloat16, has_bias=False)
    many = [leaves[0].detach().repeat(64, 1).requires_grad_(), leaves[1]]
    labels = labels.repeat(64)
    found = torch.autograd.grad(chunked(many, labels, num_rows=4), many[1])[0]
    exact = [each.detach().double().requires_grad_() for each in many]
    expected = torch.autograd.grad(whole(exact, labels), exact[1])[0]
    assert found.dtype is torch.bfloat16
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_larger_than_a_chunk_or_a_gradient(reduction):
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(100, 8, requires_grad=True)
    labels = torch.randint(0, 100, (64,))
    with LargestTensor() as largest:
        linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, num_rows=8
        ).sum().backward()
    assert largest.num_elements == 800


def test_all_chunks_share_one_buffer():
    leaves, labels = make_inputs()
    chunking = Chunking(num_rows=4, product_dtype=torch.float64, loss_dtype=torch.float64)
    with torch.no_grad():
        chunks = row_chunks(*leaves, Targets(labels=labels), chunking)
        found = {(chunk.exponentials.data_ptr(), chunk.products.data_ptr()) for chunk in chunks}
    assert len(found) == len(set(*found)) == 1


def test_gradients_are_handed_out_once():
    leaves, labels = make_inputs()
    loss = chunked(leaves, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(JobError, match="handed its gradients out already"):
        loss.backward()
    rows = chunked(leaves, labels, reduction="none").sum()
    rows.backward(retain_graph=True)
    rows.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    leaves, labels = make_inputs()
    loss = chunked(leaves, labels, reduction=reduction).sum()
    with pytest.raises(JobError, match="differentiated again"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        ({"hidden": torch.zeros(3, 4)}, r"hidden \(3, 4\)"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \(4,\)"),
        ({"labels": torch.zeros(3)}, "torch.float32"),
        ({"bias": torch.zeros(5)}, r"bias \(5,\)"),
        ({"class_weight": torch.zeros(5)}, r"class_weight \(5,\)"),
        ({"reduction": "max"}, "'max'"),
        ({"label_smoothing": 1.5}, "1.5"),
        ({"num_rows": 0}, "num_rows=0"),
    ],
)
def test_what_does_not_belong_together_is_refused(changed, fragment):
    arguments = {
        "hidden": torch.zeros(3, 5),
        "weight": torch.zeros(7, 5),
        "labels": torch.zeros(3, dtype=torch.int64),
        **changed,
    }
    first = [arguments.pop(name) for name in ("hidden", "weight", "labels")]
    with pytest.raises(JobError, match=fragment):
        linear_cross_entropy(*first, **arguments)
