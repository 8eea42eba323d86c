"""Modules that autocast leaves alone compute as without it, in whatever way the step is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.conformance.builders import (
    Residual,
    large_residual,
    near_peak,
    ragged_tokens,
    residual,
    sgd,
    squared_error,
)
from tests.zoo.small_jobs import session_of
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.configfile.plan_settings import read_plan_settings
from memfit.errors import ConfigFileError, StrategyError
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules
from memfit.strategies import ActivationCheckpointing, Bf16, Fp16, MicroBatching

SHORT = [(Bf16, torch.bfloat16), (Fp16, torch.float16)]


def types_in(run: memfit.Run, *names: str) -> dict[str, list[torch.dtype]]:
    """Note the type of what modules give, each time they run."""
    found: dict[str, list[torch.dtype]] = {name: [] for name in names}
    for name in names:
        run.model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: found[name].append(out.dtype)
        )
    return found


def weights_after(job: Job, *strategies: object, num_steps: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with memfit.start(job, Plan(strategies=strategies)) as run:
        for _ in range(num_steps):
            run.step(job.batch(job.batch_size))
    return {name: each.detach().clone() for name, each in run.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), SHORT)
def test_a_kept_module_gives_float32_and_the_others_do_not(kind, dtype):
    job = residual()
    with memfit.start(job, Plan(strategies=(kind(keep=("1",)),))) as run:
        found = types_in(run, "0.up", "1.up", "1.down", "2.up")
        run.step(job.batch(10))
    assert found == {
        "0.up": [dtype], "1.up": [torch.float32], "1.down": [torch.float32], "2.up": [dtype]
    }  # fmt: skip


@pytest.mark.slow
def test_it_is_what_autocast_switched_off_by_hand_is():
    class ByHand(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for number, block in enumerate(self):
                    if number == 1:
                        with torch.autocast("cpu", enabled=False):
                            x = block(x.float())
                    else:
                        x = block(x)
            return x

    job = residual(width=32)
    theirs = replace(job, model=lambda: ByHand(*(Residual(32) for _ in range(4))))
    ours = weights_after(job, Bf16(keep=("1",)))
    assert all(torch.equal(ours[name], each) for name, each in weights_after(theirs).items())
    without = weights_after(job, Bf16())
    assert any(not torch.equal(ours[name], each) for name, each in without.items())


@pytest.mark.slow
def test_a_model_that_is_kept_whole_is_the_plain_one_to_the_bit():
    ours = weights_after(residual(), Bf16(keep=("0-3",)))
    assert all(torch.equal(ours[name], each) for name, each in weights_after(residual()).items())


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [("1",), ("0-3",), ("1.up", "1.down")])
def test_what_is_recomputed_is_recomputed_in_the_same_type(blocks):
    job, keep = residual(width=32), Bf16(keep=("1",))
    checkpointing = ActivationCheckpointing(blocks=blocks)
    ours, theirs = (weights_after(job, *each, keep) for each in ((checkpointing,), ()))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_kept_module_inside_a_recomputed_block_stays_in_float32():
    job = residual(width=32)
    keep = Bf16(keep=("1.down", "3.norm"))
    ours = weights_after(job, ActivationCheckpointing(), keep)
    assert all(torch.equal(ours[n], each) for n, each in weights_after(job, keep).items())


@pytest.mark.slow
def test_micro_batches_and_ragged_tokens_go_with_it():
    keep = Bf16(keep=("blocks.1", "embedding"))
    found = memfit.verify(
        ragged_tokens(), Plan(strategies=(MicroBatching(micro_batch_size=2), keep)),
        dtype=torch.float32,
    )  # fmt: skip
    assert found.gradient_error < 5e-2
    assert found.numerics == "approximate"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        (ActivationCheckpointing(), Bf16(keep=("1", "2.up"))),
        (ActivationCheckpointing(blocks=("1-2",)), Bf16(keep=("1",))),
        (MicroBatching(micro_batch_size=192), Bf16(keep=("0-1",))),
        (MicroBatching(micro_batch_size=192), Fp16(keep=("2.down",))),
    ],
    ids=lambda each: " ".join(one.label() for one in each),
)
def test_recorded_bytes_are_the_measured_ones(strategies):
    if Fp16 in map(type, strategies) and is_beyond_rules("float16"):
        pytest.skip("what oneDNN's kernels for fp16 take is not known")
    job, plan = large_residual(), Plan(strategies=strategies)
    predicted, measured = memfit.predict(job, plan=plan), memfit.measure(job, plan)
    assert predicted.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)


@pytest.mark.slow
def test_what_is_kept_costs_the_memory_that_bf16_saves():
    plain, kept, whole = (
        memfit.predict(large_residual(), plan=Plan(strategies=each)).peak_allocated_bytes
        for each in ((), (Bf16(keep=("0-2",)),), (Bf16(),))
    )
    assert whole < kept < plain


@pytest.mark.slow
def test_a_virtual_card_is_recorded_with_it():
    sizes = [
        memfit.predict(large_residual(), "a100-40gb", Plan(strategies=(Bf16(keep=keep),)))
        for keep in ((), ("0-2",))
    ]
    assert sizes[0].peak_allocated_bytes < sizes[1].peak_allocated_bytes
    assert sizes[1].numerics == "approximate"


class Attending(nn.Module):
    """Attention whose last layer is read and never called, and members that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.attention(x, x, x)[0]


def attending() -> Job:
    return Job(
        model=Attending,
        batch=lambda size: (torch.randn(size, 3, 8), torch.randn(size, 3, 8)),
        loss=squared_error,
        optimizer=sgd,
        batch_size=4,
    )


@pytest.mark.parametrize(
    ("run", "name", "message"),
    [
        (memfit.start, "layer", r"no module named 'layer' \(near: layers"),
        (memfit.start, "layers", r"layers only holds other modules.*layers\.0"),
        (
            lambda job, plan: memfit.predict(job, plan=plan),
            "attention.out_proj",
            r"the step does not call attention\.out_proj",
        ),
        (
            lambda job, plan: memfit.start(job, plan).step(job.batch(4)),
            "attention.out_proj",
            r"the step does not call attention\.out_proj",
        ),
    ],
)
def test_a_name_that_would_keep_nothing_is_refused(run: Callable[..., object], name, message):
    with pytest.raises(StrategyError, match=message):
        run(attending(), Plan(strategies=(Bf16(keep=(name,)),)))


def test_undo_gives_the_forwards_back():
    session = session_of(residual())
    before = [vars(module).get("forward") for module in session.model.modules()]
    undo = Bf16(keep=("0-1", "2.up")).apply(session)
    assert [vars(module).get("forward") for module in session.model.modules()] != before
    undo()
    assert [vars(module).get("forward") for module in session.model.modules()] == before
    assert session.forward_contexts == []


def test_labels_say_that_names_are_kept_and_not_cast(tmp_path):
    setting = Bf16(keep=("0-1", "head"))
    assert setting.label() == "bf16(keep=0-1 head)"
    assert Bf16().label() == "bf16"
    Plan(strategies=(setting,)).save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.strategies == (setting,)
    assert loaded.numerics == "approximate"
    with pytest.raises(ConfigFileError, match="keeps 0-1, head out of autocast"):
        read_plan_settings(tmp_path / "plan.yaml")
