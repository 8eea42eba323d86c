"""Networks of convolutions that are computed in rows give the results of whole ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.rules import HAS_KNOWN_CONVOLUTIONS
from tests.zoo.convolution_networks import UNet, networks
from tests.zoo.small_jobs import mean_square_job, session_of
from tests.zoo.stranger_networks import stranger_networks
from torch import nn
from torch.utils._pytree import tree_leaves

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.strategies.convolution_tiling import ConvolutionTiling, TiledNetworks

EXACT = 1e-10


def tiled(network: nn.Module, num_tiles: int = 3, recompute: float = 0.25) -> nn.Module:
    session = session_of(mean_square_job(lambda: network))
    ConvolutionTiling(num_tiles=num_tiles, recompute=recompute).apply(session)
    return session.model


def results(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss, and the gradients of the input and all parameters."""
    x = x.detach().clone().requires_grad_()
    outs = tree_leaves(network(x))
    loss = sum(out.square().mean() + out.sigmoid().mean() for out in outs)
    loss.backward()
    given = [x, *network.parameters()]
    return loss.detach(), [each.grad for each in given if each.grad is not None]


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference, as a part of the largest gradient."""
    assert len(found) == len(expected)
    largest = max(each.abs().max().item() for each in expected)
    pairs = zip(found, expected, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs) / largest


def is_tiled(network: nn.Module, x: torch.Tensor) -> bool:
    out = tree_leaves(network(x))[0]
    return "_Tiled" in str(_all_nodes(out.grad_fn))


def _all_nodes(node, depth: int = 40) -> list[str]:
    if node is None or not depth:
        return []
    return [
        type(node).__name__,
        *(n for f, _ in node.next_functions for n in _all_nodes(f, depth - 1)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_tiles", [2, 5, 13])
@pytest.mark.parametrize("recompute", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("name", list(networks()))
def test_loss_and_gradients_are_those_of_the_whole(name, recompute, num_tiles):
    torch.manual_seed(0)
    network, shape = networks()[name]
    network, x = network.double(), torch.randn(shape, dtype=torch.float64)
    loss, grads = results(copy.deepcopy(network), x)
    here = tiled(copy.deepcopy(network), num_tiles, recompute)
    assert is_tiled(here, x) or name == "wavenet"
    found_loss, found = results(here, x)
    assert abs(found_loss - loss) <= EXACT * abs(loss)
    assert apart(found, grads) <= EXACT


FOLLOWED = {"padded-unet", "frozen-statistics", "shared-pyramid", "attention-gate", "twice-through"}


@pytest.mark.parametrize(("num_tiles", "recompute"), [(2, 0.0), (7, 3.0)])
@pytest.mark.parametrize("name", list(stranger_networks()))
def test_networks_that_tiling_was_not_made_for_keep_their_results(name, num_tiles, recompute):
    torch.manual_seed(0)
    network, shape = stranger_networks()[name]
    network, x = network.double(), torch.randn(shape, dtype=torch.float64)
    loss, grads = results(copy.deepcopy(network), x)
    here = tiled(copy.deepcopy(network), num_tiles, recompute)
    assert is_tiled(here, x) is (name in FOLLOWED)
    found_loss, found = results(here, x)
    assert abs(found_loss - loss) <= EXACT * abs(loss)
    assert apart(found, grads) <= EXACT


@pytest.mark.slow
def test_single_precision_is_as_near_as_rounding():
    torch.manual_seed(0)
    network, x = UNet(), torch.randn(2, 3, 37, 51)
    _, grads = results(copy.deepcopy(network), x)
    _, found = results(tiled(copy.deepcopy(network)), x)
    assert apart(found, grads) < 1e-5


def test_gradients_of_half_parameters_add_up_in_single_precision():
    torch.manual_seed(0)
    network, shape = networks()["unet-3d"]
    network, x = network.bfloat16(), torch.randn(shape).bfloat16()
    _, grads = results(copy.deepcopy(network), x)
    _, found = results(tiled(copy.deepcopy(network), num_tiles=16), x)
    assert all(each.dtype is torch.bfloat16 for each in found)
    assert apart([each.float() for each in found], [each.float() for each in grads]) < 0.05


def test_frozen_parameters_get_no_gradients():
    network = UNet()
    network.down.requires_grad_(requires_grad=False)
    x = torch.randn(1, 3, 20, 24)
    for each in tree_leaves(tiled(network)(x)):
        each.mean().backward(retain_graph=False) if each.requires_grad else None
        break
    assert all(each.grad is None for each in network.down.parameters())
    assert network.head.weight.grad is not None


def test_outputs_that_were_detached_stay_so():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3)

        def forward(self, x):
            inner = self.a(x)
            return self.b(inner), inner.detach() * 2

    first, second = tiled(Two())(torch.randn(1, 2, 12, 12))
    assert first.requires_grad
    assert not second.requires_grad


def test_an_output_may_be_overwritten_afterwards():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(1, 2, 12, 12, dtype=torch.float64)

    def grads(model):
        F.relu_(model(x)).sum().backward()
        return [each.grad for each in model.parameters()]

    assert apart(grads(tiled(copy.deepcopy(network))), grads(network)) < EXACT


class Wrapped(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.between = between
        self.register_buffer("seen", torch.zeros(()))
        self.counted = 0

    def forward(self, x):
        return self.b(self.between(self, self.a(x)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def _hooked(_, x):
    x.register_hook(lambda grad: 3 * grad)
    return x


def _counting(module, x):
    module.counted += 1
    return x


def _branching(_, x):
    return x if x.mean() > 0 else 2 * x


def _writing(module, x):
    module.seen.add_(1)
    return x * module.seen


def _set_anew(module, x):
    module.seen = module.seen + 1
    return x * module.seen


def _slicing(_, x):
    x = x.clone()
    x[:, 0] = 0
    return x


def _ungraded(_, x):
    with torch.no_grad():
        scale = x.abs().amax()
    return x / scale


OTHERS = {
    "reversed gradients": lambda _, x: Reversed.apply(x),
    "a hook on a tensor": _hooked,
    "a count": _counting,
    "a branch on a value": _branching,
    "a buffer": _writing,
    "a buffer set anew": _set_anew,
    "an assignment": _slicing,
    "no gradients": _ungraded,
    "dropout": lambda _, x: F.dropout(x, 0.5),
    "reversed rows": lambda _, x: x.flip(2),
    "rolled rows": lambda _, x: x.roll(1, 3),
    "a softmax over rows": lambda _, x: x.softmax(3),
    "a mean over rows": lambda _, x: x - x.mean((2, 3), keepdim=True),
    "a sum that runs along": lambda _, x: x.cumsum(3),
    "a mean with another divisor": lambda _, x: F.avg_pool2d(x, 2, divisor_override=3),
    "a norm of a batch": lambda _, x: F.batch_norm(x, None, None, training=True),
    "swapped axes": lambda _, x: x.transpose(2, 3),
    "a reshape": lambda _, x: x.reshape(x.shape[0], 4, x.shape[3], x.shape[2]),
    "numbers of rows": lambda _, x: x * torch.arange(x.shape[3], dtype=x.dtype, device=x.device),
    "data": lambda _, x: x + x.data,
    "a requires_grad": lambda _, x: x.detach().requires_grad_() * x,
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_anything_between_gives_the_same_or_is_left_alone(name):
    def run(model):
        torch.manual_seed(1)
        loss, grads = results(model, x)
        return loss, grads, model.counted, model.seen.clone()

    torch.manual_seed(0)
    network = Wrapped(OTHERS[name]).double()
    x = torch.randn(2, 2, 17, 23, dtype=torch.float64)
    loss, grads, counted, seen = run(copy.deepcopy(network))
    found_loss, found, found_counted, found_seen = run(tiled(copy.deepcopy(network)))
    assert abs(found_loss - loss) <= EXACT * abs(loss)
    assert apart(found, grads) <= EXACT
    assert (found_counted, found_seen) == (counted, seen)


def test_gradients_that_are_wanted_twice_are_refused():
    loss = tiled(UNet())(torch.randn(1, 3, 20, 24))[0].mean()
    loss.backward(retain_graph=True)
    with pytest.raises(StrategyError, match="wanted twice"):
        loss.backward()


def test_modules_with_hooks_inside_run_as_they_are():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3))
    calls = []
    network[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 2, 12, 12)
    assert not is_tiled(tiled(network), x)
    assert calls == [1]


def image_job(side: int = 96) -> memfit.Job:
    return memfit.Job(
        model=lambda: UNet(),
        batch=lambda n: torch.rand(n, 3, side, side + 7),
        loss=lambda model, x: model(x)[0].square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=1,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_KNOWN_CONVOLUTIONS,
    reason="what convolutions take inside is known for AVX2 and AVX-512",
)
def test_the_peak_falls_and_is_predicted():
    plan = Plan(strategies=(ConvolutionTiling(num_tiles=24),))
    plain = memfit.measure(image_job()).peak_allocated_bytes
    measured = memfit.measure(image_job(), plan=plan).peak_allocated_bytes
    predicted = memfit.predict(image_job(), device="cpu", plan=plan).peak_allocated_bytes
    assert measured < 0.46 * plain
    assert abs(predicted - measured) <= 0.005 * measured


def test_a_step_shows_what_can_be_tiled_and_why_not():
    with ConvolutionTiling.probe() as facts:
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))(
            torch.randn(1, 2, 12, 12)
        )
        UNet()(torch.randn(1, 3, 20, 24))
    found = facts()
    assert isinstance(found, TiledNetworks)
    assert found.largest_bytes == 8 * 20 * 24 * 4
    assert "draws random numbers" in found.reasons[0]
