"""Autocast and scalers that a step brings itself are seen, and left to it or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Plan
from memfit.cli.main import main
from memfit.errors import JobFunctionError
from memfit.strategies import ActivationCheckpointing, Bf16, Fp16, MicroBatching
from memfit.strategies.base import Numerics, Seam, Strategy
from memfit.verification.verify import verify

SCRIPT = """
from dataclasses import replace

import torch
from torch import nn
import memfit

scaler = torch.amp.GradScaler("cpu")


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def loss(model, batch, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype=dtype):
        return model(batch).float().square().mean()


def scaled(model, batch):
    return scaler.scale(loss(model, batch, torch.float16))


job = memfit.Job(
    model=model,
    batch=lambda size: torch.randn(size, 64),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
)
half = replace(job, loss=lambda model, batch: loss(model, batch, torch.float16))
scaling = replace(job, loss=scaled)
off = torch.amp.GradScaler("cuda", enabled=False)  # as torch makes it where there is no card
idle = replace(job, loss=lambda model, batch: off.scale(model(batch).square().mean()))
plain = replace(job, loss=lambda model, batch: model(batch).square().mean())


def build():
    trained, batch = model().cuda(), torch.randn(16, 64, device="cuda")
    optimizer, scaler = torch.optim.SGD(trained.parameters(), lr=0.1), torch.amp.GradScaler()

    def step():
        with torch.autocast("cuda"):
            loss = trained(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return lambda name: f"{path}:{name}"


# --- As a user asks ---


@pytest.mark.slow
def test_a_loss_under_autocast_is_said_and_no_second_one_is_offered(ask, script):
    words = ("--allow", "bf16", "--allow", "fp16", "--budget", "1GiB")
    found = ask("plan", script("job"), *words)
    assert any("an autocast of its own, in bfloat16" in note for note in found["notes"])
    refused = {each["strategy"]: each["reason"] for each in found["refused"]}
    for name in ("bf16", "fp16"):
        assert "script.py:16), which has precedence" in refused[name]
    assert not {each["allow"] for each in found["approximations"]} & {"bf16", "fp16"}
    assert not any("autocast" in note for note in ask("predict", script("plain"))["notes"])


@pytest.mark.slow
def test_without_one_both_are_offered(ask, script):
    found = ask("plan", script("plain"), "--budget", "1GiB")
    assert {"bf16", "fp16"} <= {each["allow"] for each in found["approximations"]}


def test_what_requires_one_all_the_same_is_told_why_not(refuse, script):
    line = refuse("plan", script("job"), "--require", "bf16")
    assert "runs under an autocast of its own, in bfloat16" in line


@pytest.mark.slow
def test_float16_without_a_scaler_is_named_with_what_scales(ask, script):
    (note,) = on_precision(ask("predict", script("half"))["notes"])
    assert "in float16" in note
    assert "nothing scales it" in note
    assert "allow fp16, which scales" in note


@pytest.mark.parametrize("command", ["predict", "plan", "measure", "verify"])
def test_a_loss_that_scales_itself_is_refused_with_the_strategy_that_scales(
    refuse, script, command
):
    line = refuse(command, script("scaling"))
    assert "scales itself with a GradScaler" in line
    assert "script.py:21" in line
    assert "`memfit plan --allow fp16`" in line


@pytest.mark.slow
def test_a_step_that_scales_is_named_as_the_strategy_that_does(ask, script):
    (note,) = ask("predict", script("build"), "--device", "t4")["notes"]
    assert "runs under autocast in float16" in note
    assert "calls a GradScaler" in note
    assert "the strategy fp16" in note


@pytest.mark.slow
def test_a_scaler_that_is_off_without_a_card_is_said_before_it_is_refused_on_one(ask, script):
    (note,) = ask("predict", script("idle"))["notes"]
    assert "calls a GradScaler" in note
    assert "script.py:34) that is switched off here" in note


@pytest.mark.slow
def test_a_verification_compares_under_the_autocast_and_says_so(script, capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    Plan(strategies=(MicroBatching(micro_batch_size=5),)).save(plan)
    assert main(["verify", script("job"), "--plan", str(plan), "--verbose"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "under the loss's own autocast in bfloat16 it is off by" in shown
    assert "exact" in shown


# --- What is seen, and what is not ---


def mixed_loss(model, batch, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype=dtype):
        return model(batch).float().square().mean()


def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


JOB = mean_square_job(model, 16, batch_size=12, loss=mixed_loss)


class Decorated(nn.Sequential):
    """A forward under autocast, as libraries wrap it."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


def with_islands(model, batch):
    with torch.autocast("cpu", enabled=False):
        return model(batch).square().mean()


def on_precision(notes):
    """Leave out what is said of a processor whose kernels no rule describes."""
    return [note for note in notes if "oneDNN" not in note]


@pytest.mark.slow
def test_a_decorated_forward_is_seen_and_what_is_switched_off_is_not():
    plain = replace(JOB, loss=lambda model, batch: model(batch).square().mean())
    decorated = replace(plain, model=lambda: Decorated(*model()))
    assert "in bfloat16" in memfit.predict(decorated).notes[0]
    assert not memfit.predict(replace(JOB, loss=with_islands)).notes
    for strategy in (Bf16(), Fp16()):  # memfit's own autocast is not the job's
        assert not on_precision(memfit.predict(plain, plan=Plan(strategies=(strategy,))).notes)


@pytest.mark.slow
def test_autocast_for_another_device_is_not_in_force_and_not_said():
    assert not memfit.predict(JOB, "t4").notes
    on_card = replace(JOB, loss=cuda_loss)
    assert "in bfloat16" in memfit.predict(on_card, "l4").notes[0]


def cuda_loss(model, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(batch).float().square().mean()


def test_a_run_refuses_a_loss_that_scales_itself_at_its_first_step():
    scaler = torch.amp.GradScaler("cpu")
    job = replace(JOB, loss=lambda model, batch: scaler.scale(mixed_loss(model, batch)))
    with memfit.start(job) as run, pytest.raises(JobFunctionError, match="scales itself"):
        run.step(job.batch(12))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with memfit.start(job) as run:
        run.step(job.batch(12))
        assert run.num_steps == 1


# --- Verified under it ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [MicroBatching(micro_batch_size=5), ActivationCheckpointing(blocks=("0",))]
)
def test_exact_plans_are_exact_under_it_up_to_its_own_rounding(strategy):
    found = verify(JOB, Plan(strategies=(strategy,)))
    assert (found.earned, found.dtype) == ("exact", "float64")
    assert any(note.startswith("under the loss's own autocast") for note in found.notes)


@dataclass(frozen=True, kw_only=True)
class WrongUnderAutocast(Strategy):
    """Keeps results in fp64, where autocast does nothing, and loses them under it."""

    name: ClassVar[str] = "wrong-under-autocast"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})

    def apply(self, session):
        hook = session.model.register_forward_hook(twice_as_large)
        return hook.remove


def twice_as_large(_module, _inputs, output):
    return 2 * output if output.dtype is torch.bfloat16 else output


def test_a_plan_that_goes_wrong_under_it_alone_is_found():
    found = verify(JOB, Plan(strategies=(WrongUnderAutocast(),)))
    assert found.earned == "different"
    assert not found.keeps_promise


def test_an_approximate_plan_is_compared_with_the_step_under_it():
    found = verify(JOB, Plan(strategies=(WrongUnderAutocast(),)), dtype=torch.float32)
    assert found.earned == "different"
    assert "compared under the loss's own autocast in bfloat16" in found.notes
