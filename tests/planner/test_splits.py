"""The planner takes pieces that are proved, or tried where that is wanted, and says which."""

from __future__ import annotations

import json

import pytest
import torch
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.opaque_jobs import kept_apart, labelled_job, mixed, opaque_job
from tests.zoo.planned_jobs import reasons

import memfit
from memfit.cli.main import main
from memfit.errors import StrategyError
from memfit.planner.search.splits import SplitChecks
from memfit.strategies import build_strategy
from memfit.strategies.evidence import Evidence
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan

ALONE = (
    "tiling",
    "activation-checkpointing",
    "activation-offload",
    "optimizer-in-backward",
    "optimizer-implementation",
    "loss-chunking",
)


def planned(job, *, share=0.6, forbid=ALONE, **wanted) -> Plan:
    budget = int(share * memfit.predict(job).peak_allocated_bytes)
    return memfit.plan(job, budget=budget, forbid=forbid, **wanted)


def wide(operator) -> memfit.Job:
    return opaque_job(operator, batch_size=64, width=16)


def refusal(job, **wanted) -> str:
    plan = memfit.plan(job, budget="1GiB", require=["micro-batching"], **wanted)
    return reasons(plan)["micro-batching"]


@pytest.mark.slow
def test_a_proved_plan_says_so_in_one_line():
    plan = planned(wide(torch.sin))
    assert plan.proof is Evidence.PROVED
    assert plan.reasons == (f"{plan.labels()[0]}: proved from the recorded step.",)
    assert all(rung.proof is Evidence.PROVED for rung in plan.ladder)


@pytest.mark.slow
def test_what_could_not_be_followed_is_left_out_with_operator_line_and_remedies():
    plan = memfit.plan(wide(kept_apart), prove=False, forbid=["tiling"])
    assert not any("micro-batching" in each.name for each in plan.strategies)
    with pytest.raises(memfit.errors.NoPlanFitsError) as caught:
        planned(wide(kept_apart), prove=False)
    message = str(caught.value)
    assert "could not be proved" in message
    assert "kept_apart at zoo/opaque_jobs.py:" in message
    assert "--allow unproved" in message
    assert "--prove" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unproved", "micro-batching"])
def test_what_is_allowed_by_name_is_taken_unproved(name):
    plan = planned(wide(kept_apart), prove=False, allow=[name])
    assert plan.proof is Evidence.UNPROVED
    assert plan.numerics == "unproved"
    assert "not proved" in plan.reasons[0]


@pytest.mark.slow
def test_a_real_batch_settles_what_could_not_be_followed_and_says_so(tmp_path):
    plan = planned(wide(kept_apart), prove=True)
    assert plan.proof is Evidence.TRIAL
    assert plan.numerics == "exact"
    assert "settled by trial: on one batch" in plan.reasons[0]
    assert "Not proved" in plan.reasons[0]
    path = tmp_path / "plan.yaml"
    plan.save(path)
    again = Plan.load(path)
    assert (again.proof, again.reasons) == (plan.proof, plan.reasons)


@pytest.mark.slow
def test_a_real_batch_refutes_what_mixes_samples_with_the_numbers():
    with pytest.raises(StrategyError, match=r"differs by .* \(relative, float64; rounding"):
        memfit.plan(wide(mixed), require=["micro-batching"], prove=True)


@pytest.mark.slow
def test_a_short_step_is_tried_without_being_asked_for_and_a_long_one_is_not(monkeypatch):
    assert planned(wide(kept_apart)).proof is Evidence.TRIAL
    monkeypatch.setattr("memfit.planner.trial._MOST_FLOPS", 10.0)
    with pytest.raises(memfit.errors.NoPlanFitsError, match="could not be proved"):
        planned(wide(kept_apart))


@pytest.mark.slow
def test_what_is_proved_is_not_tried(monkeypatch):
    def no_trial(*_args):
        raise AssertionError("it was proved")

    monkeypatch.setattr("memfit.planner.trial.compared_with", no_trial)
    assert planned(wide(torch.sin), prove=True).proof is Evidence.PROVED


@pytest.mark.slow
def test_a_batch_that_breaks_its_condition_is_refused_with_the_remedy():
    job = labelled_job(ignored=3, batch_size=64)
    with pytest.raises(StrategyError, match=r"batch\['labels'\] holds -100 .*memfit\.Total"):
        memfit.plan(job, require=["micro-batching"])


@pytest.mark.slow
def test_a_condition_that_holds_is_told():
    plan = memfit.plan(labelled_job(ignored=0), require=["micro-batching"])
    assert "holds while batch['labels'] never holds -100" in plan.reasons[0]


@pytest.mark.slow
def test_a_size_is_looked_into_only_when_it_is_considered(monkeypatch):
    from memfit.separation import separation

    sizes = []
    record = separation.record_step
    monkeypatch.setattr(
        separation,
        "record_step",
        lambda job, layout, size, **settings: (
            sizes.append(size) or record(job, layout, size, **settings)
        ),
    )
    memfit.plan(wide(torch.sin), budget="1GiB", forbid=["optimizer-in-backward"])
    looked_into = set(sizes)
    assert 1 not in looked_into
    assert len(sizes) == len(looked_into), "each size is recorded once"


def test_what_a_copy_has_found_out_is_not_told_of_before_it_is_asked_for():
    split = build_strategy("micro-batching", {"micro_batch_size": 2})
    facts = JobFacts(
        batch_size=4,
        device_type="cpu",
        batch_norms=(),
        has_dropout=False,
        block_levels=(),
        optimizer="SGD",
    )
    checks = SplitChecks([split], facts)
    checks._foreseen[split] = None  # as a fast copy leaves it, and a slow one does not
    assert not checks.allows_some
    assert checks.obstacle(split) is None
    assert checks.allows_some


@pytest.mark.slow
def test_the_command_says_what_proved_a_plan(tmp_path, capsys):
    path = tmp_path / "job.py"
    path.write_text(
        "import torch\nfrom memfit import Job\n"
        "job = Job(model=lambda: torch.nn.Linear(64, 64), batch=lambda n: torch.randn(n, 64),\n"
        "    loss=lambda m, b: m(b).square().mean(),\n"
        "    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=64)\n"
    )
    assert main(["plan", str(path), "--require", "micro-batching", "--json", "--no-prove"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["proof"] == "proved"
    assert shown["reasons"] == [
        f"{shown['strategies'][-1]['name']}(32): proved from the recorded step."
    ]
    page = tmp_path / "plan.html"
    assert main(["plan", str(path), "--require", "micro-batching", "--html", str(page)]) == 0
    assert "proved from the recorded step" in capsys.readouterr().out
    assert "proved from the recorded step" in page.read_text("utf-8")


@pytest.mark.slow
def test_a_coupled_job_names_the_strategy_that_computes_its_loss_on_the_whole_batch():
    job = wide(lambda x: x - x.mean(0))
    way = r"the exact way is cached-gradients \(`memfit plan --require cached-gradients`\)"
    plan = Plan(strategies=(build_strategy("micro-batching", {"micro_batch_size": 4}),))
    for refused in (
        lambda: memfit.plan(job, require=["micro-batching"]),
        lambda: memfit.predict(job, plan=plan),
    ):
        with pytest.raises(StrategyError, match=way) as caught:
            refused()
        assert str(caught.value).count("way") == 1


@pytest.mark.slow
def test_transformers_are_proved():
    job = planner_jobs.transformer()
    plan = memfit.plan(job, require=["micro-batching"])
    assert plan.proof is Evidence.PROVED
