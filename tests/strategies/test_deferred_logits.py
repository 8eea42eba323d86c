"""Linear layers whose outputs become a cross-entropy are found, and nothing else changes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.errors import StrategyError
from memfit.strategies.linear_cross_entropy.deferred_logits import DeferredLogits, deferred_logits
from memfit.strategies.linear_cross_entropy.noted_logits import NotedHead, noted_heads
from memfit.trace.subclasses import parts_of

CLASSES, FEATURES, ROWS = 1100, 6, 10
EVEN = torch.arange(ROWS) % 2 == 0


class LogSoftmaxOfLabel(torch.autograd.Function):
    """A loss of the user's own, which Python's overrides do not see."""

    @staticmethod
    def forward(ctx, logits, labels):
        probability = torch.softmax(logits, -1)
        ctx.save_for_backward(probability, labels)
        return -probability.gather(-1, labels[:, None]).log().sum()

    @staticmethod
    def backward(ctx, grad):
        probability, labels = ctx.saved_tensors
        ones = torch.ones_like(probability[:, :1])
        return grad * probability.scatter_add(-1, labels[:, None], -ones), None


def tokens(logits):
    """See rows as sequences of five tokens."""
    return logits.view(2, 5, CLASSES)


# --- what is streamed: (model, x, y) -> loss -------------------------------------------------------

STREAMED = {
    "as it is": lambda m, x, y: F.cross_entropy(m(x), y),
    "module": lambda m, x, y: nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(m(x), y),
    "ignored": lambda m, x, y: F.cross_entropy(input=m(x), target=y, ignore_index=int(y[0])),
    "weighted": lambda m, x, y: F.cross_entropy(m(x), y, weight=m.weight.detach().abs().sum(1)),
    "by row": lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * x[:, 0]).sum(),
    "view": lambda m, x, y: F.cross_entropy(tokens(m(x)).view(-1, CLASSES), y),
    "view, open": lambda m, x, y: F.cross_entropy(tokens(m(x)).reshape((ROWS, -1)), y),
    "flattened": lambda m, x, y: F.cross_entropy(tokens(m(x)).flatten(end_dim=1), y),
    "shifted": lambda m, x, y: F.cross_entropy(
        tokens(m(x))[..., :-1, :].contiguous().view(-1, CLASSES), y.view(2, 5)[..., 1:].flatten()
    ),
    "first rows": lambda m, x, y: F.cross_entropy(m(x)[:3], y[:3]),
    "new dimension": lambda m, x, y: F.cross_entropy(m(x)[None, :, :].flatten(0, 1), y),
    "mask": lambda m, x, y: F.cross_entropy(m(x)[EVEN], y[EVEN]),
    "gathered": lambda m, x, y: F.cross_entropy(
        tokens(m(x))[torch.tensor([0, 1]), torch.tensor([4, 2])], y[[4, 7]]
    ),
    "one row": lambda m, x, y: F.cross_entropy(m(x[4]), y[4]) + 0 * x.sum(),
    "classes second": lambda m, x, y: F.cross_entropy(
        tokens(m(x)).transpose(1, 2), y.view(2, 5), reduction="none"
    ).sum(),
    "permuted": lambda m, x, y: F.cross_entropy(tokens(m(x)).permute(1, 2, 0), y.view(2, 5).t()),
    "same device": lambda m, x, y: F.cross_entropy(m(x).to("cpu").to(x.device, x.dtype), y),
    "log-softmax": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=-1), y),
    "log-softmax, rows": lambda m, x, y: (
        F.nll_loss(m(x).log_softmax(1)[1:], y[1:], reduction="none").square().sum()
    ),
    "product": lambda m, x, y: F.cross_entropy(x @ m.weight.T, y) + 0 * m.bias.sum(),
    "matmul": lambda m, x, y: (
        F.cross_entropy(torch.matmul(tokens_of(x), m.weight.t()).flatten(0, 1), y)
        + 0 * m.bias.sum()
    ),
    "twice": lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(2 * x)[1:], y[1:]),
    "in an object": lambda m, x, y: F.cross_entropy(SimpleNamespace(logits=m(x)).logits, y),
}


def tokens_of(hidden):
    return hidden.view(2, 5, FEATURES)


def changed_in_place(m, x, y):
    """Views see a change in place, copies do not."""
    logits = m(x)
    view, copy, same = logits[1:], logits.float(), logits.contiguous()
    logits.mul_(2.0)
    return (
        F.cross_entropy(view, y[1:])
        + F.cross_entropy(copy, y)
        + F.cross_entropy(same, y)
        + logits.square().mean()
    )


def hooked(m, x, y):
    logits = m(x)
    logits.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(logits, y)


def hooked_layer(m, x, y):
    m.register_full_backward_hook(lambda _module, grads, _out: (3 * grads[0],))
    return F.cross_entropy(m(x), y)


def without_gradients_on_the_way(m, x, y):
    logits = m(x)
    with torch.no_grad():
        best = logits.view(-1, CLASSES).max()
    return F.cross_entropy(logits, y) * best


def both_ways(m, x, y):
    logits = m(x)
    return LogSoftmaxOfLabel.apply(logits, y) + F.cross_entropy(logits.exp(), y) + logits.mean()


# --- what is made as before ------------------------------------------------------------------------

MADE = {
    "scaled": lambda m, x, y: F.cross_entropy(m(x) / 3, y),
    "soft targets": lambda m, x, y: F.cross_entropy(
        m(x), torch.softmax(x.detach() @ m.weight.detach().T, -1)
    ),
    "stacked": lambda m, x, y: F.cross_entropy(torch.cat([m(x), m(x)]), torch.cat([y, y])),
    "row by row": lambda m, x, y: sum(
        F.cross_entropy(row, label) for row, label in zip(m(x), y, strict=True)
    ),
    "classes picked": lambda m, x, y: F.cross_entropy(m(x)[:, :50], y % 50),
    "classes counted": lambda m, x, y: F.cross_entropy(m(x)[..., y], torch.arange(ROWS)),
    "classes folded": lambda m, x, y: F.cross_entropy(m(x).view(-1, 50), y.repeat(22) % 50),
    "no classes left": lambda m, x, y: F.cross_entropy(m(x).flatten(), y[0]),
    "over rows": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=0), y),
    "not normalised": lambda m, x, y: F.nll_loss(m(x), y),
    "old words": lambda m, x, y: torch.ops.aten.cross_entropy_loss(m(x), y),
    "rows second": lambda m, x, y: F.cross_entropy(m(x).t(), y.repeat(110) % ROWS),
    "metric first": lambda m, x, y: (
        lambda logits: (logits.argmax(-1) == y).sum() + F.cross_entropy(logits, y)
    )(m(x)),
    "autograd function": lambda m, x, y: LogSoftmaxOfLabel.apply(m(x), y),
    "autograd function of a view": lambda m, x, y: LogSoftmaxOfLabel.apply(m(x)[EVEN], y[EVEN]),
    "autograd function of logarithms": lambda m, x, y: LogSoftmaxOfLabel.apply(
        F.log_softmax(m(x), 1), y
    ),
    "both ways": both_ways,
    "changed in place": changed_in_place,
    "hook": hooked,
    "layer's hook": hooked_layer,
    "layer's output changed": lambda m, x, y: (
        m.register_forward_hook(lambda _module, _in, out: out * 2) and F.cross_entropy(m(x), y)
    ),
    "no gradients on the way": without_gradients_on_the_way,
    "checkpointed": lambda m, x, y: F.cross_entropy(checkpoint(m, x, use_reentrant=False), y),
    "checkpointed, old way": lambda m, x, y: F.cross_entropy(
        checkpoint(m, x, use_reentrant=True), y
    ),
    "checkpointed with the loss": lambda m, x, y: checkpoint(
        lambda x: F.cross_entropy(m(x).view(-1, CLASSES), y), x, use_reentrant=False
    ),
}
# After a loss the logits may be wanted as well.
MADE_LATER = {
    "square": lambda logits, y: logits.square().mean(),
    "view": lambda logits, y: logits.view(-1).logsumexp(0),
    "autograd function": LogSoftmaxOfLabel.apply,
    "gradients off": lambda logits, y: (logits.detach().argmax(-1) == y).sum(),
}


def outcome(loss_of, *, is_deferred):
    """Return loss and gradients, and what was noted on the way."""
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, CLASSES).double()
    hidden = torch.randn(ROWS, FEATURES, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, CLASSES, (ROWS,))
    with noted_heads() as heads:
        if is_deferred:
            with deferred_logits(4):
                loss = loss_of(model, hidden, labels)
        else:
            loss = loss_of(model, hidden, labels)
    loss.backward()
    values = [loss.detach(), hidden.grad, *(each.grad for each in model.parameters())]
    assert type(loss) is torch.Tensor
    return values, heads


def assert_same(loss_of):
    expected, noted = outcome(loss_of, is_deferred=False)
    found, streamed = outcome(loss_of, is_deferred=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert noted == streamed, "what a plain step is noted for is what is streamed"
    return streamed


@pytest.mark.parametrize("loss_of", STREAMED.values(), ids=STREAMED)
def test_the_loss_of_a_linear_layer_is_streamed(loss_of):
    heads = assert_same(loss_of)
    assert heads
    assert {head.num_classes for head in heads} == {CLASSES}


@pytest.mark.parametrize("loss_of", MADE.values(), ids=MADE)
def test_logits_that_are_needed_are_made_as_before(loss_of):
    assert assert_same(loss_of) == []


@pytest.mark.parametrize("use", MADE_LATER.values(), ids=MADE_LATER)
def test_logits_that_are_needed_after_a_loss_are_made_then(use):
    def loss_of(m, x, y):
        logits = m(x)
        first = F.cross_entropy(logits[1:], y[1:])
        return first + use(logits, y) + F.cross_entropy(logits, y)

    assert assert_same(loss_of) == [NotedHead(num_rows=ROWS - 1, num_classes=CLASSES)]


@pytest.mark.parametrize("casts", ["float", "to", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_logits_are_computed_in_their_own_type_and_losses_in_that_of_the_cast(dtype, casts):
    model = nn.Linear(FEATURES, CLASSES).to(dtype)
    hidden = torch.randn(ROWS, FEATURES, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, CLASSES, (ROWS,))
    cast = {
        "float": lambda logits: logits.float(),
        "to": lambda logits: logits.to(dtype=torch.float32),
        "contiguous": lambda logits: logits.contiguous(),
    }[casts]
    expected = F.cross_entropy(cast(model(hidden)), labels)
    expected_grads = torch.autograd.grad(expected, [hidden, *model.parameters()])
    with noted_heads() as heads, deferred_logits(4):
        found = F.cross_entropy(cast(model(hidden)), labels)
    assert len(heads) == 1
    assert found.dtype is expected.dtype
    torch.testing.assert_close(
        found, expected, rtol=1e-2 if casts == "contiguous" else 1e-6, atol=0
    )
    grads = torch.autograd.grad(found, [hidden, *model.parameters()])
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).norm() <= max(1e-6, 2 * torch.finfo(dtype).eps) * other.norm()


@pytest.mark.parametrize("use", ["loss", "square", "function"])
def test_the_autocast_around_the_layer_counts_and_not_the_one_around_the_loss(use):
    model, hidden = nn.Linear(FEATURES, CLASSES), torch.randn(ROWS, FEATURES)
    labels = torch.randint(0, CLASSES, (ROWS,))
    uses = {
        "loss": lambda logits: F.cross_entropy(logits.float(), labels),
        "square": lambda logits: logits.square().sum(),
        "function": lambda logits: LogSoftmaxOfLabel.apply(logits, labels),
    }

    def value():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(hidden)
        assert logits.dtype is torch.bfloat16
        return uses[use](logits)

    expected = value()
    with deferred_logits(4):
        found = value()
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_deferred_logits_answer_questions_without_being_made():
    model, hidden = nn.Linear(FEATURES, CLASSES), torch.randn(2, 5, FEATURES)
    with deferred_logits(4):
        logits = model(hidden)
        seen = logits.transpose(1, 2)
    assert isinstance(logits, torch.Tensor)
    assert isinstance(seen, DeferredLogits)
    assert (logits.shape, seen.shape) == ((2, 5, CLASSES), (2, CLASSES, 5))
    assert (logits.size(-1), logits.dim(), logits.ndim, len(logits)) == (CLASSES, 3, 3, 2)
    assert logits.numel() == 10 * CLASSES
    assert (logits.dtype, logits.device, logits.is_cuda) == (torch.float32, hidden.device, False)
    assert (logits.requires_grad, logits.is_leaf) == (True, False)
    assert logits.grad_fn is not None
    assert {logits: 1}[logits] == 1
    assert not logits._member.family.is_real


def test_deferred_logits_take_no_memory_and_say_so():
    model, hidden = nn.Linear(FEATURES, CLASSES), torch.randn(ROWS, FEATURES)
    with deferred_logits(4):
        logits = model(hidden)
    assert [*parts_of(logits)] == []
    assert not logits._member.family.is_real


def test_deferred_logits_go_on_outside_the_block():
    model, hidden = nn.Linear(FEATURES, CLASSES), torch.randn(ROWS, FEATURES)
    with deferred_logits(4):
        logits = model(hidden)
    torch.testing.assert_close(logits + 0, model(hidden))
    assert type(model(hidden)) is torch.Tensor


def test_logits_are_let_go_with_the_tensors_that_stand_for_them():
    model, hidden = nn.Linear(FEATURES, CLASSES).bfloat16(), torch.randn(ROWS, FEATURES).bfloat16()
    with deferred_logits(4):
        logits = model(hidden)
        copy = logits.float()
        copy.sum()
    of_logits, of_copy = (weakref.ref(each._member.real) for each in (logits, copy))
    assert of_logits() is not None
    del logits
    assert of_logits() is None
    assert of_copy() is not None
    del copy
    assert of_copy() is None


@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_change_in_place_before_the_loss_is_refused(what):
    layer = nn.Linear(FEATURES, CLASSES)
    hidden = torch.randn(ROWS, FEATURES)
    with deferred_logits(4):
        logits = layer(hidden)
        with torch.no_grad():
            (hidden if what == "input" else layer.weight).mul_(2.0)
        with pytest.raises(StrategyError, match="--forbid linear-cross-entropy"):
            F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64))
        with pytest.raises(StrategyError, match="changed in place"):
            logits.sum()


NOT_DEFERRED = {
    "few classes": lambda: nn.Linear(6, 1000)(torch.randn(4, 6)),
    "a wide layer inside a model": lambda: nn.Linear(300, 1200)(torch.randn(4, 300)),
    "frozen": lambda: nn.Linear(6, CLASSES).requires_grad_(False)(torch.randn(4, 6)),
    "a batch of products": lambda: (
        torch.randn(2, 4, 6, requires_grad=True) @ torch.randn(2, 6, CLASSES)
    ),
    "a vector": lambda: torch.randn(CLASSES, 6, requires_grad=True) @ torch.randn(6),
}


@pytest.mark.parametrize("make", NOT_DEFERRED.values(), ids=NOT_DEFERRED)
def test_other_products_are_left_alone(make):
    with deferred_logits(4):
        assert type(make()) is torch.Tensor


def test_nothing_is_put_off_without_gradients():
    with deferred_logits(4), torch.no_grad():
        assert type(nn.Linear(FEATURES, CLASSES)(torch.randn(4, FEATURES))) is torch.Tensor


def test_a_layer_refuses_what_it_would_have_refused():
    layer = nn.Linear(FEATURES, CLASSES)
    with deferred_logits(4):
        with pytest.raises(RuntimeError, match="shapes"):
            layer(torch.randn(4, FEATURES + 1))
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(4, FEATURES).double())
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(layer(torch.randn(4, FEATURES)), torch.zeros(3, dtype=torch.int64))
        labels = torch.zeros(2, 5, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="target size"):
            F.cross_entropy(layer(torch.randn(2, 5, FEATURES)), labels)


@pytest.mark.slow
def test_compiled_code_is_left_alone():
    layer, hidden = nn.Linear(FEATURES, CLASSES), torch.randn(ROWS, FEATURES)
    compiled = torch.compile(lambda hidden: layer(hidden) * 2, backend="eager")
    with deferred_logits(4):
        torch.testing.assert_close(compiled(hidden), layer(hidden) * 2)
