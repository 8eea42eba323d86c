"""Tiled blocks give the results of whole ones in less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conformance.builders import CONVOLUTION_TOLERANCE, PEAK_TOLERANCE, near_peak
from tests.zoo.small_jobs import facts_of, mean_square_job, session_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Job, Plan
from memfit.errors import StrategyError
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.bf16 import Bf16
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.tiling import TileableBlocks, TiledForward, Tiling, tiles

EXACT = 1e-12


def plan_of(*strategies) -> Plan:
    return Plan(strategies=strategies)


def mlp(width: int = 6, expansion: int = 4, rate: float = 0.0) -> nn.Sequential:
    hidden = expansion * width
    layers = [nn.Linear(width, hidden), nn.GELU(), nn.Dropout(rate), nn.Linear(hidden, width)]
    return nn.Sequential(*layers)


def chain() -> nn.Sequential:
    """Reach over 1 + 4 = 5 rows and 1 + 2 = 3 columns."""
    dilated = nn.Conv2d(5, 5, (5, 3), padding="same", dilation=2)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.SiLU(), dilated, nn.Tanh(), nn.Conv2d(5, 4, 1)
    )


def over_time() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 5, 3, padding=3, dilation=3), nn.ReLU(), nn.Conv1d(5, 3, 5, padding=2)
    )


def tile_by_hand(block, num_tiles: int):
    """Tile a block, and give its forward as it was."""
    whole = block.forward
    block.forward = TiledForward(block, num_tiles)
    return whole


def gradients(function, inputs, parameters):
    """Return an output and the gradients of a loss in which no two places weigh the same."""
    out = function(inputs)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), torch.autograd.grad((out * weights).sum(), [inputs, *parameters])


@pytest.mark.parametrize("num_tiles", [2, 3, 5, 8, 100])
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (mlp, (11, 6)),
        (mlp, (3, 7, 6)),
        (mlp, (2, 3, 5, 6)),
        (chain, (2, 3, 19, 7)),
        (chain, (2, 3, 7, 19)),
        (chain, (3, 9, 5)),
        (over_time, (2, 3, 29)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_output_and_gradients_are_those_of_the_whole_block(block, shape, num_tiles):
    torch.manual_seed(0)
    block, inputs = block().double(), torch.randn(*shape, dtype=torch.double, requires_grad=True)
    parameters = list(block.parameters())
    whole = tile_by_hand(block, num_tiles)
    expected_out, expected = gradients(whole, inputs, parameters)
    out, found = gradients(block, inputs, parameters)
    torch.testing.assert_close(out, expected_out, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_inputs_out_of_order_in_memory_give_the_same():
    torch.manual_seed(0)
    for block, inputs in (
        (mlp().double(), torch.randn(3, 6, 7, dtype=torch.double).mT),
        (chain().double(), torch.randn(2, 9, 7, 3, dtype=torch.double).permute(0, 3, 1, 2)),
    ):
        whole = tile_by_hand(block, 2)
        inputs.requires_grad_()
        expected = gradients(whole, inputs, [])
        torch.testing.assert_close(gradients(block, inputs, []), expected, rtol=EXACT, atol=EXACT)
        assert block(inputs).stride() == whole(inputs).stride()


def test_frozen_parameters_and_inputs_without_gradients_get_none():
    block = mlp().double()
    block[0].weight.requires_grad_(False)
    whole = tile_by_hand(block, 3)
    inputs = torch.randn(7, 6, dtype=torch.double)
    (whole(inputs).square().sum()).backward()
    expected = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    (block(inputs).square().sum()).backward()
    found = [parameter.grad for parameter in block.parameters()]
    assert found[0] is expected[0] is None
    torch.testing.assert_close(found[1:], expected[1:], rtol=EXACT, atol=EXACT)
    assert not block.requires_grad_(False)(inputs).requires_grad


def test_hooks_on_parameters_fire_once_per_backward():
    block = mlp()
    tile_by_hand(block, 4)
    calls = []
    for name, parameter in block.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(("gradient", name)))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    block(torch.randn(8, 6)).sum().backward()
    assert len(calls) == len(set(calls)) == 2 * len(list(block.parameters()))


@pytest.mark.slow
def test_gradients_are_handed_over_not_copied():
    """Beyond the plain step there is one tile's gradient of one parameter at a time."""
    job = mean_square_job(lambda: mlp(64, 16), 64, batch_size=4)
    plan = plan_of(Tiling(num_tiles=2))
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    largest_parameter_bytes = 64 * 16 * 64 * 4
    plain = memfit.predict(job).peak_allocated_bytes
    assert predicted - plain < 1.1 * largest_parameter_bytes
    assert memfit.measure(job, plan).peak_allocated_bytes == near_peak(predicted)


def test_a_tied_weight_outside_the_block_keeps_its_gradient_under_autocast():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    inputs = torch.randn(9, 6)

    def gradient() -> torch.Tensor:
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = nn.functional.linear(block(inputs), block[0].weight)
        out.float().square().sum().backward()
        return block[0].weight.grad.clone()

    expected = gradient()
    tile_by_hand(block, 3)
    torch.testing.assert_close(gradient(), expected, rtol=0.02, atol=0.02 * float(expected.norm()))


class NotedRows(TorchDispatchMode):
    """Notes how many rows linear layers are given; a note in the block would be its effect."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            self.rows.append(args[1].shape[0])
        return func(*args, **(kwargs or {}))


def test_a_call_of_another_form_is_carried_out_as_it_is():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x, gate=None, mix=False):
            x = self.layers(x if gate is None else x * gate)
            return x.cumsum(0) if mix else x

    block = Sometimes()
    whole = tile_by_hand(block, 2)
    inputs = torch.randn(6, 6)
    for arguments in ({"mix": True}, {"gate": torch.rand(6, 6)}):
        assert torch.equal(block(inputs, **arguments), whole(inputs, **arguments))
    with NotedRows() as noted:
        block(inputs, mix=False)
    assert noted.rows[-4:] == [3, 3, 3, 3]


def test_an_input_without_positions_gives_an_output_without_any():
    block = mlp()
    tile_by_hand(block, 2)
    assert block(torch.randn(0, 6)).shape == (0, 6)


def test_a_second_derivative_is_refused():
    block = mlp()
    tile_by_hand(block, 2)
    inputs = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(StrategyError, match="only the first derivative"):
        torch.autograd.grad(block(inputs).sum(), inputs, create_graph=True)


def test_without_gradients_a_block_is_tiled_as_well():
    block = mlp().double()
    whole = tile_by_hand(block, 3)
    with torch.no_grad():
        inputs = torch.randn(7, 6, dtype=torch.double)
        torch.testing.assert_close(block(inputs), whole(inputs), rtol=EXACT, atol=EXACT)


def test_tiles_cover_every_position_once():
    for num_positions in range(1, 30):
        for num_tiles in range(2, 12):
            cut = list(tiles(num_positions, num_tiles, halo=3))
            covered = [place for tile in cut for place in range(tile.start, tile.stop)]
            assert covered == list(range(num_positions))
            assert len(cut) <= num_tiles
            assert all(tile.seen_start == max(0, tile.start - 3) for tile in cut)
            assert all(tile.seen_stop == min(num_positions, tile.stop + 3) for tile in cut)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpointed_block_masks_are_replayed_twice(use_reentrant):
    block = mlp(rate=0.5).double()
    tile_by_hand(block, 3)
    inputs = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    found = []
    for outer in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        block.zero_grad()
        inputs.grad = None
        outer(inputs).square().sum().backward()
        found.append([inputs.grad.clone(), *(p.grad.clone() for p in block.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=EXACT, atol=EXACT)


def test_the_random_state_afterwards_is_that_of_forward():
    block = mlp(rate=0.5)
    tile_by_hand(block, 3)
    out = block(torch.randn(8, 6))
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def stacked(rate: float = 0.0, width: int = 8, batch_size: int = 4) -> Job:
    """Return two blocks of an MLP behind a layer that mixes tokens."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp(width, rate=rate)

        def forward(self, x):
            return x + self.mlp(x.cumsum(1))

    return mean_square_job(lambda: nn.Sequential(Block(), Block()), 9, width, batch_size=batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        (ActivationCheckpointing(),),
        (MicroBatching(micro_batch_size=3),),
        (ActivationCheckpointing(), MicroBatching(micro_batch_size=3)),
    ],
    ids=lambda others: "+".join(other.name for other in others),
)
def test_tiling_together_with_others_is_exact(others):
    plan = plan_of(Tiling(num_tiles=4), *others)
    assert memfit.verify(stacked(), plan).largest_error <= EXACT


@pytest.mark.slow
def test_under_bf16_gradients_are_those_of_bf16_alone():
    job = stacked()
    plain, tiled = (
        memfit.verify(job, plan_of(*strategies), dtype=torch.float32)
        for strategies in ((Bf16(),), (Tiling(num_tiles=4), Bf16()))
    )
    assert tiled.gradient_error <= 1.5 * plain.gradient_error
    plan = plan_of(Tiling(num_tiles=4), Bf16())
    predicted = memfit.predict(stacked(width=128), plan=plan).peak_allocated_bytes
    measured = memfit.measure(stacked(width=128), plan).peak_allocated_bytes
    assert measured == near_peak(predicted)


def test_only_named_blocks_are_tiled_and_unknown_ones_refused():
    session = session_of(stacked(rate=0.1))
    facts = gather_facts(session)
    found = facts.of(TileableBlocks)
    assert found.names == found.with_dropout == ("0.mlp", "1.mlp")
    undo = Tiling(num_tiles=2, blocks=("1.mlp",)).apply(session)
    assert [isinstance(block.mlp.forward, TiledForward) for block in session.model] == [False, True]
    undo()
    assert "forward" not in vars(session.model[1].mlp)
    refusal = Tiling(num_tiles=2, blocks=("0.mlp", "2.mlp")).obstacle(facts)
    assert refusal == "2.mlp cannot be tiled; what can is: 0.mlp, 1.mlp."


def test_numerics_are_same_in_law_where_a_tiled_block_draws():
    own = TileableBlocks(names=("0.mlp", "1.mlp"), with_dropout=("0.mlp",))
    facts = replace(facts_of(stacked()), own=(own,))
    for blocks, numerics in (((), "same-in-law"), (("1.mlp",), "exact")):
        assert str(Tiling(num_tiles=2, blocks=blocks).numerics_for(facts)) == numerics


# --- Memory ---


def wide_mlp() -> Job:
    return mean_square_job(lambda: mlp(64), 256, 64, batch_size=16)


def deep_chain() -> Job:
    def model():
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
        return nn.Sequential(nn.Sequential(*layers), nn.AvgPool2d(4))

    return mean_square_job(model, 16, 64, 64, batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "most_fraction", "tolerance"),
    [(wide_mlp, 0.45, PEAK_TOLERANCE), (deep_chain, 0.6, CONVOLUTION_TOLERANCE)],
)
def test_eight_tiles_take_the_memory_that_was_predicted_and_less(job, most_fraction, tolerance):
    plan = plan_of(Tiling(num_tiles=8))
    predicted = memfit.predict(job(), plan=plan).peak_allocated_bytes
    assert predicted <= most_fraction * memfit.predict(job()).peak_allocated_bytes
    measured = memfit.measure(job(), plan).peak_allocated_bytes
    assert measured == near_peak(predicted, tolerance)


@pytest.mark.slow
def test_a_tiled_step_is_predicted_for_a_gpu():
    job = stacked(rate=0.1, width=256, batch_size=512)
    plan = plan_of(Tiling(num_tiles=8), ActivationCheckpointing(), Bf16())
    tiled = memfit.predict(job, plan=plan, device="a100-40gb")
    plain = memfit.predict(job, device="a100-40gb")
    assert tiled.peak_allocated_bytes < plain.peak_allocated_bytes


def test_the_gradient_says_how_the_loss_changes_since_masks_are_replayed():
    torch.manual_seed(0)
    block = mlp(rate=0.4).double()
    tile_by_hand(block, 3)
    inputs = torch.randn(8, 6, dtype=torch.double)

    def loss_at(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return block(values).square().sum()

    leaf = inputs.clone().requires_grad_()
    (direction,) = torch.autograd.grad(loss_at(leaf), leaf)
    step = 1e-6
    change = loss_at(inputs + step * direction) - loss_at(inputs - step * direction)
    slope = float(change.detach()) / (2 * step)
    assert slope == pytest.approx(float(direction.square().sum()), rel=1e-6)
