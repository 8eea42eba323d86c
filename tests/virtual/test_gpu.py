"""Unchanged CUDA code is recorded on a virtual GPU: where tensors lie, and what is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.virtual.steps import FLOAT, HALF, LONG, on_card, sizes
from torch import nn

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import RecordingError
from memfit.prediction.recording import record_steps
from memfit.virtual.tensors import ValuesNeededError

NUM = 300
BLOCK = 512  # what a small tensor takes of the card
NUM_BYTES = NUM * FLOAT


def one_step(step, device="a100-40gb"):
    return record_steps(lambda: step, load_device(device), num_steps=1)


def live_bytes(trace) -> int:
    """Return what lives at the end."""
    return sum(num_bytes for _, num_bytes in trace.deltas())


def held_bytes(make) -> int:
    """Record the making of something that is kept, and give what it takes on the card."""
    kept = []
    return live_bytes(one_step(lambda: kept.append(make())).steady)


# --- where tensors lie ----------------------------------------------------------------------------

ON_CARD = {
    "zeros": lambda: torch.zeros(NUM, device="cuda"),
    "with an index": lambda: torch.zeros(NUM, device="cuda:0"),
    "device object": lambda: torch.zeros(NUM, device=torch.device("cuda")),
    "device object with an index": lambda: torch.ones(NUM, device=torch.device("cuda", 0)),
    "a number": lambda: torch.randn(NUM, device=0),
    "like, a number": lambda: torch.zeros_like(torch.zeros(NUM), device=0),
    "cuda()": lambda: torch.zeros(NUM).cuda(),
    "cuda(0)": lambda: torch.zeros(NUM).cuda(0, non_blocking=True),
    "cuda(device)": lambda: torch.zeros(NUM).cuda(torch.device("cuda")),
    "to(name)": lambda: torch.zeros(NUM).to("cuda"),
    "to(number)": lambda: torch.zeros(NUM).to(0),
    "to(device, dtype)": lambda: torch.zeros(NUM, dtype=torch.float64).to("cuda", torch.float32),
    "to(device=, dtype=)": lambda: torch.zeros(NUM).to(device="cuda", dtype=torch.float32),
    "to(other)": lambda: torch.zeros(NUM, dtype=torch.int8).to(torch.zeros(1, device="cuda")),
    "to(memory_format=)": lambda: torch.zeros(1, 3, 10, 10).to(
        "cuda", memory_format=torch.channels_last
    ),
    "pinned": lambda: torch.zeros(NUM).pin_memory().to("cuda", non_blocking=True),
    "tensor(list)": lambda: torch.tensor([1.0] * NUM, device="cuda"),
    "tensor(array)": lambda: torch.tensor(np.zeros(NUM, np.float32), device="cuda"),
    "as_tensor(list)": lambda: torch.as_tensor([1.0] * NUM, device="cuda"),
    "as_tensor(array)": lambda: torch.as_tensor(np.zeros(NUM, np.float32), device="cuda"),
    "asarray(array)": lambda: torch.asarray(np.zeros(NUM, np.float32), device=0),
    "from_numpy": lambda: torch.from_numpy(np.zeros(NUM, np.float32)).to("cuda"),
    "arange": lambda: torch.arange(NUM, device="cuda", dtype=torch.float32),
    "linspace": lambda: torch.linspace(0, 1, NUM, device="cuda"),
    "full": lambda: torch.full((NUM,), 2.0, device="cuda"),
    "new_zeros": lambda: torch.zeros(1, device="cuda").new_zeros(NUM),
    "new_tensor": lambda: torch.zeros(1, device="cuda").new_tensor([1.0] * NUM),
    "new_zeros elsewhere": lambda: torch.zeros(1).new_zeros(NUM, device="cuda"),
    "zeros_like": lambda: torch.zeros_like(torch.zeros(NUM, device="cuda")),
    "randn_like": lambda: torch.randn_like(torch.zeros(NUM), device="cuda"),
    "legacy type": lambda: torch.zeros(NUM).type("torch.cuda.FloatTensor"),
    "generator": lambda: torch.randn(NUM, device="cuda", generator=torch.Generator("cuda")),
    "parameter": lambda: nn.Parameter(torch.zeros(NUM, device="cuda")),
    "deep copy": lambda: copy.deepcopy(nn.Parameter(torch.zeros(NUM, device="cuda"))),
    "half": lambda: torch.zeros(2 * NUM, device="cuda").half(),
    "cat": lambda: torch.cat([torch.zeros(NUM // 2, device="cuda")] * 2),
}


@pytest.mark.parametrize("make", ON_CARD.values(), ids=ON_CARD)
def test_a_tensor_made_for_cuda_takes_its_bytes_on_the_card(make):
    def checked():
        tensor = make()
        assert tensor.device == torch.device("cuda", 0)
        assert (tensor.is_cuda, tensor.is_cpu, tensor.is_meta) == (True, False, False)
        assert tensor.get_device() == 0
        return tensor

    assert held_bytes(checked) == NUM_BYTES


def test_tensors_of_the_cpu_are_not_counted():
    def make():
        on_cpu = torch.zeros(NUM, device="cuda").cpu()
        assert (on_cpu.device.type, on_cpu.is_cuda, on_cpu.is_cpu) == ("cpu", False, True)
        assert on_cpu.type() == "torch.FloatTensor"
        return on_cpu, torch.zeros(NUM), torch.zeros(1, device="cuda")

    assert held_bytes(make) == FLOAT


def test_gradients_find_their_way_back_from_the_cpu():
    weight = []

    def step():
        leaf = torch.zeros(NUM, device="cuda", requires_grad=True)
        weight.append(leaf)
        (leaf * 2).cpu().sum().backward()
        assert leaf.grad.is_cuda

    assert live_bytes(one_step(step).steady) == 2 * NUM_BYTES


def test_what_is_there_already_is_not_moved_again():
    def step():
        x = torch.zeros(NUM, device="cuda")
        same = [x.to("cuda"), x.to(0), x.cuda(), x.to(x), x.float(), x.contiguous()]
        same += [x.to("cuda", torch.float32), x.to(device="cuda", copy=False), x.type(x.dtype)]
        same += [torch.as_tensor(x), torch.as_tensor(x, device="cuda"), torch.asarray(x, device=0)]
        assert {y.untyped_storage()._cdata for y in same} == {x.untyped_storage()._cdata}
        assert x.to("cuda", copy=True) is not x

    assert sizes(one_step(step).steady) == [NUM_BYTES, NUM_BYTES]


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


WEIGHTS = 64 + 8 + 8 + 8
STATISTICS = 8 + 8
MOVES = {
    "cuda": (lambda model: model.cuda(), FLOAT),
    "to(name)": (lambda model: model.to("cuda"), FLOAT),
    "to(number)": (lambda model: model.to(0), FLOAT),
    "to(device=number)": (lambda model: model.to(device=0), FLOAT),
    "to(tensor)": (lambda model: model.to(torch.zeros(1, device="cuda")), FLOAT),
    "to(device, dtype)": (lambda model: model.to("cuda", torch.bfloat16), HALF),
    "half afterwards": (lambda model: model.cuda().half(), HALF),
    "half before": (lambda model: model.bfloat16().to("cuda"), HALF),
    "there and back": (lambda model: model.cuda().cpu().cuda(), FLOAT),
}


@pytest.mark.parametrize(("move", "num_bytes"), MOVES.values(), ids=MOVES)
def test_a_module_takes_its_parameters_and_buffers_along(move, num_bytes):
    def make():
        model = move(layers())
        assert all(p.is_cuda and p.requires_grad for p in model.parameters())
        assert all(buffer.is_cuda for buffer in model.buffers())
        return model

    assert held_bytes(make) == (WEIGHTS + STATISTICS) * num_bytes + LONG


def test_a_weight_that_two_layers_share_is_moved_once():
    def make():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        model.cuda()
        assert model[1].weight is model[0].weight
        return model

    assert held_bytes(make) == 64 * FLOAT


def test_layers_built_on_the_card_never_were_elsewhere():
    def make():
        with torch.device("cuda"):
            return layers(), torch.tensor([1.0, 2.0]), torch.as_tensor(np.zeros(2, np.float32))

    assert held_bytes(make) == (WEIGHTS + STATISTICS) * FLOAT + LONG + 4 * FLOAT


def test_the_default_device_may_be_the_card():
    def make():
        torch.set_default_device("cuda")
        try:
            return layers(), torch.arange(2)
        finally:
            torch.set_default_device(None)

    assert held_bytes(make) == (WEIGHTS + STATISTICS) * FLOAT + 3 * LONG


def test_a_model_on_the_meta_device_takes_nothing_until_it_is_made_real():
    def make():
        with torch.device("meta"):
            model = layers()
        assert model[0].weight.is_meta
        return model.to_empty(device="cuda")

    assert held_bytes(make) == (WEIGHTS + STATISTICS) * FLOAT + LONG


def test_a_model_on_the_meta_device_cannot_be_moved():
    with pytest.raises(RecordingError, match="to_empty"):
        one_step(lambda: nn.Linear(3, 3, device="meta").to("cuda"))


SECOND_CARD = {
    "factory": lambda: torch.zeros(3, device="cuda:1"),
    "number": lambda: torch.zeros(3, device=1),
    "cuda(1)": lambda: torch.zeros(3).cuda(1),
    "to(1)": lambda: torch.zeros(3).to(1),
    "module": lambda: nn.Linear(3, 3).to("cuda:1"),
    "like": lambda: torch.zeros_like(torch.zeros(3), device="cuda:1"),
    "set_device": lambda: torch.cuda.set_device(1),
    "guard": lambda: torch.cuda.device(1),
    "generator": lambda: torch.Generator(device="cuda:1"),
}


@pytest.mark.parametrize("use", SECOND_CARD.values(), ids=SECOND_CARD)
def test_a_second_card_is_refused(use):
    with pytest.raises(RecordingError, match=r"cuda:1.*single card"):
        one_step(use)


MIXED = {
    "add": lambda: on_card(3) + torch.zeros(3),
    "the other way round": lambda: torch.zeros(3) + on_card(3),
    "in place": lambda: on_card(3).add_(torch.zeros(3)),
    "linear": lambda: nn.Linear(3, 3).cuda()(torch.zeros(2, 3)),
    "model left behind": lambda: nn.Linear(3, 3)(on_card(2, 3)),
    "embedding": lambda: nn.Embedding(3, 3).cuda()(torch.zeros(2, dtype=torch.long)),
    "labels": lambda: nn.functional.cross_entropy(on_card(3, 4), torch.zeros(3, dtype=torch.long)),
    "cat": lambda: torch.cat([on_card(3), torch.zeros(3)]),
    "lstm": lambda: nn.LSTM(3, 3).cuda()(torch.zeros(2, 1, 3)),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_tensors_of_card_and_cpu_do_not_mix(mix):
    with pytest.raises(RecordingError, match=r"same device|different devices"):
        one_step(mix)


def test_numbers_indices_and_copies_may_come_from_the_cpu():
    def step():
        x = on_card(NUM)
        x.mul_(torch.tensor(2.0))
        x.copy_(torch.zeros(NUM))
        x[torch.zeros(NUM, dtype=torch.long)]

    assert sizes(one_step(step).steady, "zeros") == [NUM_BYTES]


# --- what torch.cuda says -------------------------------------------------------------------------


def test_code_that_asks_for_a_gpu_finds_the_named_one():
    def step():
        card = torch.cuda.get_device_properties(torch.device("cuda"))
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_name(0) == card.name == device.title
        assert torch.cuda.get_device_capability() == (card.major, card.minor) == (7, 5)
        assert torch.cuda.mem_get_info()[1] == card.total_memory == device.memory_bytes
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        assert torch.get_device_module() is torch.cuda
        assert torch.backends.cudnn.version() >= 8000
        return torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")

    device = load_device("t4")
    assert sizes(one_step(step, "t4").steady) == [FLOAT]


def test_streams_events_ranges_and_counters_do_nothing():
    def step():
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        event.record()
        with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.nvtx.range("step"):
            x = on_card(NUM)
        torch.cuda.current_stream().wait_stream(stream)
        x.record_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(0)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory.memory_reserved() == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert event.elapsed_time(event) == 0

    assert sizes(one_step(step).steady) == [NUM_BYTES]


ways_to_empty = pytest.mark.parametrize(
    "empty",
    [
        lambda: torch.cuda.empty_cache(),
        lambda: torch.cuda.memory.empty_cache(),
        lambda: torch.accelerator.empty_cache(),
        torch.cuda.empty_cache,
    ],
    ids=["cuda", "memory", "accelerator", "imported by name"],
)


@ways_to_empty
def test_emptying_the_cache_is_noted_where_it_happens(empty):
    def step():
        on_card(3)
        empty()
        on_card(4)

    history = one_step(step).history
    assert history.events == [0, -1, 1, -2]
    assert history.releases == [2]


def questions() -> tuple:
    return (
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        torch.zeros(2).to(torch.float64).is_cuda,
        torch.zeros(2).type(),
        torch.Generator,
        torch.zeros,
        torch.nn.Module._apply,
        torch.cuda.Stream,
        torch.get_device_module,
        torch.backends.cudnn.version(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_as_before_after_a_recording(fails):
    before = questions()

    def step():
        with torch.autocast("cuda"):
            on_card(3)
            if fails:
                raise KeyError("inside")

    with pytest.raises(RecordingError, match="inside") if fails else nullcontext():
        one_step(step)
    assert questions() == before
    assert not torch.is_autocast_enabled("cuda")
    with torch.device("cpu"):
        assert torch.zeros(2).device.type == "cpu"


def test_what_lies_in_memory_by_chance_is_no_known_value():
    def step():
        lengths = torch.tensor([3, 5])
        unknown = on_card(2, dtype=torch.long).cpu()
        made = [lengths[unknown], torch.empty_like(lengths), lengths.new_empty(2)]
        assert [tensor.constant for tensor in made] == [None, None, None]
        assert lengths.clone().tolist() == [3, 5]

    one_step(step)


# --- refusals -------------------------------------------------------------------------------------

VALUES = {
    "item": (lambda: on_card(3).sum().item(), "_local_scalar_dense"),
    "float": (lambda: float(on_card(3).sum()), "_local_scalar_dense"),
    "if": (lambda: bool((on_card(3) > 0).all()), "_local_scalar_dense"),
    "tolist": (lambda: torch.arange(3, device="cuda").tolist(), "_local_scalar_dense"),
    "numpy": (lambda: on_card(3).cpu().numpy(), "numpy"),
    "nonzero": (lambda: on_card(3).nonzero(), "nonzero"),
    "mask": (lambda: on_card(3)[on_card(3) > 0], "nonzero"),
    "masked_select": (lambda: on_card(3).masked_select(on_card(3) > 0), "masked_select"),
    "unique": (lambda: torch.unique(on_card(3)), "_unique2"),
    "classes": (lambda: nn.functional.one_hot(on_card(3, dtype=torch.long)), "_local_scalar_dense"),
}


@pytest.mark.parametrize(("look", "operator"), VALUES.values(), ids=VALUES)
def test_a_look_at_values_is_refused_with_operator_line_and_way_out(look, operator):
    with pytest.raises(ValuesNeededError) as caught:
        one_step(look)
    text = str(caught.value)
    assert operator in text
    assert f"{Path(__file__).name}, line {look.__code__.co_firstlineno}" in text
    assert "Take it out of the step" in text
    assert "`memfit measure`" in text


def test_values_in_a_gradient_of_ones_own_are_refused_as_well():
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * min(1.0, grad.norm().item())

    with pytest.raises(ValuesNeededError, match="_local_scalar_dense"):
        one_step(lambda: Clipped.apply(on_card(3, requires_grad=True)).sum().backward())


@pytest.mark.slow
def test_an_operator_of_ones_own_needs_a_fake_version():
    @torch.library.custom_op("memfit_tests::opaque_on_card", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(RecordingError, match=r"memfit_tests\.opaque_on_card") as caught:
        one_step(lambda: opaque(on_card(3)))
    assert "torch.library.register_fake" in str(caught.value)
    opaque.register_fake(torch.empty_like)
    assert sizes(one_step(lambda: opaque(on_card(3))).steady, "memfit_tests.opaque_on_card") == [12]


def test_sparse_gradients_are_refused_with_what_dense_ones_take():
    def step():
        nn.Embedding(1024, 3072, sparse=True).cuda()(on_card(2, dtype=torch.long)).sum().backward()

    with pytest.raises(RecordingError, match=r"sparse=False\): this one takes 12\.0 MiB"):
        one_step(step)


def test_an_operator_that_torch_cannot_fake_is_refused_and_not_run():
    with pytest.raises(RecordingError, match=r"_to_sparse.* has no fake implementation"):
        one_step(lambda: on_card(3).to_sparse())


def test_weights_from_a_file_that_is_not_there_are_said_not_to_be_needed(tmp_path):
    with pytest.raises(RecordingError, match=r"No weights are needed.*configuration"):
        one_step(lambda: torch.load(tmp_path / "missing.pt"))


def test_a_step_that_never_touches_the_card_is_refused():
    with pytest.raises(RecordingError, match="nothing was placed on the GPU"):
        one_step(lambda: nn.Linear(3, 3)(torch.zeros(2, 3)).sum().backward())


def test_a_parameter_that_moves_stays_the_one_that_its_optimizer_holds():
    """As for real: ``model.cuda()`` after the optimizer was made trains what was moved."""
    seen = []

    def built(*, moves_first):
        def setup():
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            model[0].weight.is_special = True
            model[0].weight.register_post_accumulate_grad_hook(seen.append)
            if moves_first:
                model.cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            model.cuda()
            assert model[0].weight.is_special
            assert optimizer.param_groups[0]["params"][0] is model[0].weight

            def step():
                optimizer.zero_grad()
                model(on_card(4, 32)).sum().backward()
                assert seen.pop().is_cuda
                optimizer.step()

            return step

        return memfit.predict_step(setup, device="t4").by_category

    assert built(moves_first=False) == built(moves_first=True)


def test_hooks_of_a_frozen_parameter_move_with_it():
    """A hook is registered first, then the layer is frozen, and later trained again."""

    def setup():
        seen = []
        layer = nn.Linear(4, 4)
        layer.weight.register_hook(lambda gradient: seen.append(gradient.device.type))
        layer.weight.register_post_accumulate_grad_hook(seen.append)
        layer.weight.requires_grad_(False)
        layer.cuda()
        assert layer.weight.is_cuda
        assert not layer.weight.requires_grad
        layer.weight.requires_grad_(True)

        def step():
            layer(on_card(2, 4)).sum().backward()
            assert seen == ["cuda", layer.weight]
            seen.clear()

        return step

    memfit.predict_step(setup, device="t4")


def moved_after_a_forward(*, optimizer_is_made_first, hold=lambda _parameter: None):
    """Make a setup whose weights move while an old loss, and more, holds on to them."""

    def setup():
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        early = torch.optim.AdamW(model.parameters()) if optimizer_is_made_first else None
        held = model(torch.zeros(2, 32)).sum(), hold(model[1].weight)
        model.cuda()
        optimizer = early or torch.optim.AdamW(model.parameters())

        def step():
            model(on_card(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return held

        return step

    return setup


def test_a_parameter_that_cannot_move_beside_its_optimizer_is_refused_by_name():
    """A new parameter would be moved, and the optimizer would train the old one on the host."""
    setup = moved_after_a_forward(optimizer_is_made_first=True, hold=torch._C._WeakTensorRef)
    with pytest.raises(RecordingError, match=r"AdamW holds Linear\.weight .* \(32, 32\)") as caught:
        memfit.predict_step(setup, device="t4")
    assert "Make the optimizer after the model has moved" in str(caught.value)


@pytest.mark.parametrize(
    "early",
    [
        {"optimizer_is_made_first": False},
        {"optimizer_is_made_first": False, "hold": torch._C._WeakTensorRef},
        {"optimizer_is_made_first": True},
    ],
    ids=["nobody trains it", "torch refers to it", "autograd holds on to it"],
)
def test_a_parameter_that_is_held_moves_and_is_trained_where_it_is(early):
    half_made = torch.optim.AdamW.__new__(torch.optim.AdamW)  # as one whose arguments were refused
    found = memfit.predict_step(moved_after_a_forward(**early), device="t4").by_category
    assert not hasattr(half_made, "param_groups")
    num_bytes = 2 * (32 * 32 * FLOAT + BLOCK)
    assert (found["parameters"], found["optimizer state"]) == (num_bytes, 2 * num_bytes)
