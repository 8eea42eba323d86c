"""Verification says what a plan earned, in which precision, and sees planted faults."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.conformance import builders
from tests.zoo.small_jobs import facts_of, regression_job
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Job, Plan, Total
from memfit.analysis.separability import PROVED
from memfit.cli.main import main
from memfit.comparison.relative_errors import relative_errors
from memfit.errors import PromiseBrokenError, RecordingError, TooLargeToVerifyError
from memfit.separation.separation import Separation
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.bf16 import Bf16
from memfit.strategies.fp16 import Fp16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.verification import proof
from memfit.verification.proof import (
    affordable_batch_size,
    applicable,
    micro_batch_size,
    scaled,
    verify_each,
)

EXACT = 1e-10


def plan_of(*strategies) -> Plan:
    return Plan(strategies=strategies)


@dataclass(frozen=True, kw_only=True)
class Fault(Strategy):
    """Claim to be exact, and be something else."""

    name: ClassVar[str] = "fault"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    @classmethod
    def options(cls, facts):
        yield cls()

    def obstacle(self, facts):
        return None


class UnreplayedMasks(Fault):
    """Recompute blocks with other masks than the first time, and say so as far as law goes."""

    numerics: ClassVar[Numerics] = Numerics.SAME_IN_LAW

    def apply(self, session):
        blocks = list(session.model.children())
        for block in blocks:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )

        def undo():
            for block in blocks:
                del block.forward

        return undo


class ForgottenMomentum(Fault):
    """Lose what the optimizer keeps; the first step cannot show it."""

    def apply(self, session):
        before = session.update

        def update(session):
            before(session)
            session.optimizer.state.clear()

        session.update = update
        return lambda: setattr(session, "update", before)


class OneHeadUnmasked(Fault):
    """Attend to the future in one head."""

    def apply(self, session):
        attention = session.model.attention

        def forward(x):
            query, key, value = attention.split(x)
            mask = attention.mask(x).repeat(1, query.shape[1], 1, 1)
            mask[:, 0] = True
            return attention.merged(F.scaled_dot_product_attention(query, key, value, mask))

        attention.forward = forward
        return lambda: delattr(attention, "forward")


@dataclass(frozen=True, kw_only=True)
class EqualShares(Fault):
    """Weight micro-batches alike, though the last is smaller and each has other tokens."""

    micro_batch_size: int

    def apply(self, session):
        def gradient_pass(session, batch, enter_phase):
            pieces = list(session.layout.split(batch, self.micro_batch_size))
            losses = []
            for piece, _ in pieces:
                value = session.loss_of(piece)
                mean = value.sum / value.count if isinstance(value, Total) else value
                losses.append(mean / len(pieces))
                losses[-1].backward()
            return sum(losses).detach()

        before, session.gradient_pass = session.gradient_pass, gradient_pass
        return lambda: setattr(session, "gradient_pass", before)


class FirstRowsOnly(Fault):
    """Leave out what does not fill a micro-batch."""

    def apply(self, session):
        whole = session.gradient_pass

        def gradient_pass(session, batch, enter_phase):
            rows = session.layout.num_samples(batch) // 3 * 3
            piece, _ = next(session.layout.split(batch, rows))
            return whole(session, piece, enter_phase)

        session.gradient_pass = gradient_pass
        return lambda: setattr(session, "gradient_pass", whole)


class Attention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def split(self, x):
        parts = self.inputs(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def mask(self, x):
        return torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()

    def merged(self, heads):
        return self.outputs(heads.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.split(x), self.mask(x)))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)


def attending() -> Job:
    return regression_job(Attending, (5, 8), batch_size=6)


FAULTS = {
    "last piece": (EqualShares(micro_batch_size=4), builders.residual, "gradient_error"),
    "ragged mean": (EqualShares(micro_batch_size=1), builders.ragged_tokens, "gradient_error"),
    "dropped rows": (FirstRowsOnly(), builders.residual, "gradient_error"),
    "one head": (OneHeadUnmasked(), attending, "gradient_error"),
    "momentum": (ForgottenMomentum(), builders.residual, "parameter_error"),
    "masks not replayed": (UnreplayedMasks(), builders.residual_with_dropout, "slope_error"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "job", "field"), FAULTS.values(), ids=FAULTS)
def test_faults_break_the_promise(fault, job, field):
    found = memfit.verify(job(), plan_of(fault))
    assert not found.keeps_promise
    assert getattr(found, field) > 1e-6
    expected = re.escape(f"{fault.label()} claims {fault.numerics} and is ")
    with pytest.raises(PromiseBrokenError, match=expected):
        verify_each(job(), plan_of(fault)).check()


def test_statistics_updated_twice_break_the_promise():
    class Twice(UnreplayedMasks):
        numerics: ClassVar[Numerics] = Numerics.EXACT

    found = memfit.verify(builders.batch_normalised(), plan_of(Twice()))
    assert not found.keeps_promise
    assert found.gradient_error <= EXACT < 1e-6 < found.buffer_error == found.largest_error
    assert found.worst.startswith("buffer ")


@pytest.mark.slow
def test_what_is_equal_up_to_rounding_is_exact():
    found = memfit.verify(builders.ragged_tokens(), plan_of(MicroBatching(micro_batch_size=3)))
    assert (found.numerics, found.earned, found.dtype) == ("exact", "exact", "float64")
    assert found.bound == EXACT
    assert found.keeps_promise
    assert found.deterministic_error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "job"),
    [
        (MicroBatching(micro_batch_size=3), builders.residual_with_dropout),
        (BatchNormReplay(micro_batch_size=3), partial(builders.batch_normalised, rate=0.3)),
    ],
    ids=["micro-batching", "batchnorm-replay"],
)
def test_other_masks_are_same_in_law_when_the_arithmetic_holds_without_them(strategy, job):
    found = memfit.verify(job(), plan_of(strategy))
    assert (found.numerics, found.earned) == ("same-in-law", "same-in-law")
    assert found.largest_error > 1e-3
    assert found.deciding_error == found.deterministic_error <= EXACT
    assert found.slope_error < 1e-5


@pytest.mark.slow
def test_masks_that_no_module_declares_are_seen(monkeypatch):
    plan = plan_of(MicroBatching(micro_batch_size=3))
    job = replace(
        builders.residual(),
        loss=lambda model, batch: (
            (F.dropout(model(F.dropout(batch[0], 0.5)), 0.5) - batch[1]).square().mean()
        ),
    )
    found = memfit.verify(job, plan)
    assert (found.numerics, found.earned) == ("same-in-law", "same-in-law")
    assert found.keeps_promise
    assert found.largest_error > 1e-3
    # As if no random draw had been seen in the step.
    monkeypatch.setattr(Separation, "of", lambda *_args, **_wanted: PROVED)
    found = memfit.verify(job, plan)
    assert (found.numerics, found.earned) == ("exact", "same-in-law")
    assert not found.keeps_promise


@pytest.mark.slow
def test_autocast_is_compared_in_fp32_and_is_approximate():
    found = memfit.verify(builders.residual(), plan_of(Bf16()))
    assert (found.earned, found.dtype) == ("approximate", "float32")
    assert 1e-5 < found.largest_error < 5e-2


def into_fp32(model, batch):
    return model(batch[0].float())


def out_of_fp32(model, batch):
    return model(batch[0]).float()


@pytest.mark.slow
@pytest.mark.parametrize("predicted", [into_fp32, out_of_fp32])
def test_parts_that_insist_on_fp32_are_compared_in_fp64(predicted):
    def loss(model, batch):
        return (predicted(model, batch) - batch[1].float()).square().mean()

    job = replace(builders.residual(), loss=loss)
    found = memfit.verify(job, plan_of(MicroBatching(micro_batch_size=3)))
    assert (found.dtype, found.bound, found.earned) == ("float64", EXACT, "exact")
    assert found.largest_error <= EXACT
    assert found.is_proof
    assert "compared in fp64" in found.notes[0]


@pytest.mark.slow
def test_parts_that_write_into_fp32_of_their_own_loosen_the_bound_and_are_no_proof():
    def loss(model, batch):
        predicted = model(batch[0])
        scale = torch.zeros((), dtype=torch.float32).copy_(next(model.parameters()).sum())
        return (predicted.float() * scale).square().mean()

    found = memfit.verify(
        replace(builders.residual(), loss=loss), plan_of(MicroBatching(micro_batch_size=3))
    )
    assert EXACT < found.largest_error <= found.bound == 1e-4
    assert (found.earned, found.is_proof) == ("unproved", False)
    assert "compute in float32" in found.notes[0]


@pytest.mark.slow
def test_a_model_with_complex_weights_is_compared():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight).abs()

    job = replace(builders.residual(), model=Complex)
    found = memfit.verify(job, plan_of(MicroBatching(micro_batch_size=3)))
    assert found.earned == "exact"
    assert found.dtype == "float64"


@pytest.mark.slow
def test_steps_that_a_loss_scale_skips_are_not_held_against_it():
    job = replace(
        builders.residual(),
        loss=lambda model, batch: 1e3 * builders.squared_error(model, batch),
    )
    found = memfit.verify(job, plan_of(Fp16()))
    assert found.earned == "approximate"
    assert "steps to find its loss scale" in found.notes[0]


@pytest.mark.slow
def test_the_second_step_uses_what_the_optimizer_has_kept():
    found = memfit.verify(builders.residual(), plan_of(ForgottenMomentum()))
    assert found.gradient_error <= EXACT < found.parameter_error


@pytest.mark.slow
def test_random_states_are_left_alone():
    before = torch.get_rng_state()
    memfit.verify(builders.residual_with_dropout(), Plan())
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_missing_or_no_number_is_not_close():
    one = torch.ones(3)
    assert relative_errors({}, {"a": one}) == {"a": 1.0}
    assert relative_errors({"a": one}, {"a": torch.full((3,), torch.nan)})["a"] == float("inf")
    assert relative_errors({"a": torch.ones(2)}, {"a": one})["a"] == float("inf")
    nan = torch.tensor([1.0, torch.nan])
    assert relative_errors({"a": nan}, {"a": nan.clone()})["a"] == float("inf")
    infinite = torch.tensor([1.0, torch.inf])
    assert relative_errors({"a": infinite}, {"a": infinite.clone()})["a"] == 0.0
    assert relative_errors({"a": infinite}, {"a": -infinite})["a"] == float("inf")


# --- What this machine can run ---


@pytest.mark.slow
def test_a_batch_that_is_too_large_is_halved_to_an_odd_one(monkeypatch):
    job = builders.large_residual()
    peak = memfit.predict(job).peak_allocated_bytes
    monkeypatch.setattr(proof, "free_memory_bytes", lambda: 3 * peak)
    batch_size, notes = affordable_batch_size(job, num_times=2)
    assert batch_size < job.batch_size
    assert batch_size % 2 == 1
    assert f"batch size {batch_size} instead of 384" in notes[0]
    found = verify_each(job, plan_of(MicroBatching(micro_batch_size=100)))
    (verified,) = found.verifications
    assert verified.batch_size == batch_size
    size = int(verified.strategies[0][len("micro-batching(") : -1])
    assert batch_size % size != 0


@pytest.mark.slow
def test_long_steps_get_a_smaller_batch():
    job = builders.large_residual()
    assert affordable_batch_size(job, num_times=1, most_flops=1e3)[0] == 3


@pytest.mark.slow
def test_what_never_fits_is_refused(monkeypatch):
    monkeypatch.setattr(proof, "free_memory_bytes", lambda: 1000)
    with pytest.raises(TooLargeToVerifyError, match="at batch size 3 it takes"):
        verify_each(builders.residual())


def test_a_step_that_cannot_be_predicted_is_tried_as_it_is(monkeypatch):
    def refuse(job):
        raise RecordingError("it looks at values", "")

    monkeypatch.setattr(proof, "predict", refuse)
    assert affordable_batch_size(builders.residual(), num_times=2) == (
        10,
        ("not known to fit this machine: it looks at values",),
    )


@pytest.mark.parametrize(
    ("batch_size", "share", "is_uneven", "expected"),
    [
        (10, 1 / 3, True, 3),
        (9, 1 / 3, True, 4),
        (7, 0.125, False, 1),
        (3, 0.5, True, 2),
        (8, 0.5, False, 4),
    ],
)
def test_micro_batches_keep_their_share_and_their_rest(batch_size, share, is_uneven, expected):
    found = micro_batch_size(batch_size, share, is_uneven=is_uneven)
    assert abs(found - share * batch_size) <= abs(expected - share * batch_size)
    assert (batch_size % found != 0) == is_uneven


def test_plans_are_scaled_only_where_the_batch_shrinks():
    plan = plan_of(
        OptimizerImplementation(implementation="loop"), MicroBatching(micro_batch_size=64)
    )
    assert scaled(plan, 256, 256) == plan
    small = scaled(plan, 256, 8)
    assert small.strategies == (plan.strategies[0], MicroBatching(micro_batch_size=2))


# --- The command ---


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "import memfit\n"
        "job = memfit.Job(\n"
        "    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),\n"
        "    batch=lambda size: torch.randn(size, 6),\n"
        "    loss=lambda model, batch: model(batch).square().mean(),\n"
        "    optimizer=lambda parameters: torch.optim.Adam(parameters),\n"
        "    batch_size=10,\n"
        ")\n"
        "coupled = memfit.Job(\n"
        "    model=job.model, batch=job.batch, optimizer=job.optimizer, batch_size=10,\n"
        "    loss=lambda model, batch: model(batch).var(dim=0).sum(),\n"
        ")\n"
    )
    return path


@pytest.mark.slow
def test_the_command_shows_what_each_strategy_earns(job_file, capsys):
    assert main(["verify", f"{job_file}:job"]) == 0
    shown = capsys.readouterr().out
    assert "batch size 10" in shown
    assert "micro-batching(3)" in shown
    assert "exact" in shown


@pytest.mark.slow
def test_the_command_refuses_what_claims_too_much(job_file, tmp_path, capsys, monkeypatch):
    # As if the proof that pieces keep the results were wrong: otherwise the plan is refused.
    monkeypatch.setattr(Separation, "of", lambda *_args, **_wanted: PROVED)
    plan = tmp_path / "plan.yaml"
    plan_of(MicroBatching(micro_batch_size=4)).save(plan)
    page = tmp_path / "proof.html"
    words = ["--plan", str(plan), "--json", "--html", str(page)]
    assert main(["verify", f"{job_file}:coupled", *words]) == 1
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["keeps_promise"] is False
    assert data["verifications"][0]["numerics"] == "exact"
    assert data["verifications"][0]["earned"] in ("approximate", "different")
    assert "micro-batching(4) claims exact" in err
    written = page.read_text("utf-8")
    assert "Of 1 plan, 1 earned less than claimed." in written
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert re.search(rf'>{name}</td><td class="number[^"]*" data-value="[\d.e-]+"', written)


@pytest.mark.slow
def test_the_command_takes_size_seed_and_precision(job_file, capsys):
    words = ["--batch-size", "5", "--seed", "3", "--dtype", "fp32", "--json"]
    assert main(["verify", f"{job_file}:job", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["batch_size"] == 5
    assert {each["dtype"] for each in data["verifications"]} == {"float32"}
    assert main(["verify", f"{job_file}:job", "--batch-size", "0"]) == 2


@pytest.mark.slow
def test_each_strategy_is_offered_once():
    names = [strategy.name for strategy in applicable(facts_of(builders.residual()))]
    assert len(names) == len(set(names))
    assert "micro-batching" in names
    assert "batchnorm-replay" not in names
