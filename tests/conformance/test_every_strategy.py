"""Every strategy keeps the promises of its interface and of its numerics class.

The suite runs over ``ENTRIES`` of all_entries.py; nothing here names a strategy of its own, except to
plant faults that the suite must see.
"""

from __future__ import annotations

import pytest
import torch
from tests.zoo.small_jobs import session_of

import memfit
from memfit import Plan
from memfit.devices.catalogue import load_device
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.strategies import CATALOGUE, build_strategy
from memfit.strategies.base import Seam
from memfit.strategies.data_parallel import AbstractDataParallel

from .all_entries import ENTRIES
from .builders import TOLERANCES, near_peak

CASES = [
    pytest.param(entry, setting, id=setting.label())
    for entry in ENTRIES
    for setting in entry.settings
]
HERE = [entry for entry in ENTRIES if entry.device == "cpu"]
CASES_HERE = [case for case in CASES if case.values[0] in HERE]
CASES_AND_JOBS = [
    pytest.param(entry, setting, job, id=f"{setting.label()}-{job.__name__}")
    for entry in ENTRIES
    for setting in entry.settings
    for job in entry.jobs
]
CASES_AND_JOBS_HERE = [case for case in CASES_AND_JOBS if case.values[0] in HERE]
CASES_AND_JOBS_ELSEWHERE = [case for case in CASES_AND_JOBS if case.values[0] not in HERE]
LARGE_CASES = [
    pytest.param(entry, setting, id=setting.label())
    for entry in HERE
    for setting in entry.large_settings
]
EACH_ENTRY = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.strategy.name)


# The dictionaries in which torch keeps what a module consists of.
KINDS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def snapshot(session):
    """Note everything that a strategy may change, by identity where that is what counts."""
    model, groups = session.model, session.optimizer.param_groups
    return {
        "attributes": {
            name: {key: id(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
        "members": {
            (name, kind, key): id(member)
            for name, module in model.named_modules()
            for kind in KINDS
            for key, member in vars(module)[kind].items()
        },
        "values": {key: value.clone() for key, value in model.state_dict().items()},
        "groups": [{key: group[key] for key in group if key != "params"} for group in groups],
        "contexts": list(session.forward_contexts),
        "micro_batch_size": session.micro_batch_size,
        "gradient_pass": session.gradient_pass,
        "backward": session.backward,
        "update": session.update,
        "stateful": dict(session.stateful),
        "optimizer": id(session.optimizer),
        "optimizer step": id(vars(session.optimizer).get("step")),
        "update contexts": list(session.update_contexts),
    }


def is_same(first, second) -> bool:
    """Compare two snapshots, tensors by their bits."""
    if first["values"].keys() != second["values"].keys():
        return False
    tensors = all(
        torch.equal(first["values"][key], second["values"][key]) for key in first["values"]
    )
    rest = (key for key in first if key != "values")
    return tensors and all(first[key] == second[key] for key in rest)


def test_every_strategy_of_the_catalogue_has_one_entry():
    """Apart from those of several ranks, which real ranks carry out (tests/runtime)."""
    assert sorted(entry.strategy.name for entry in ENTRIES) == sorted(
        strategy.name for strategy in CATALOGUE if not issubclass(strategy, AbstractDataParallel)
    )


@pytest.mark.slow
@EACH_ENTRY
def test_the_planner_is_offered_settings_that_apply(entry):
    facts = record(entry.large_job(), device=load_device(entry.device)).facts
    offered = list(entry.strategy.options(facts))
    assert bool(offered) == entry.is_offered
    assert [option.obstacle(facts) for option in offered] == [None] * len(offered)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting", "job"), CASES_AND_JOBS)
def test_nothing_stands_in_the_way_of_a_job_that_it_applies_to(entry, setting, job):
    assert setting.obstacle(record(job(), device=load_device(entry.device)).facts) is None


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting", "job"), CASES_AND_JOBS_ELSEWHERE)
def test_a_step_under_what_needs_a_gpu_is_recorded_without_one(entry, setting, job):
    predicted = memfit.predict(job(), entry.device, Plan(strategies=(setting,)))
    assert predicted.strategies == (setting.label(),)
    assert predicted.numerics == str(setting.numerics)


@pytest.mark.slow
@EACH_ENTRY
def test_what_it_cannot_do_is_refused_in_a_sentence(entry):
    if entry.refusal is None:
        facts = [record(job()).facts for other in ENTRIES for job in other.jobs]
        assert {entry.settings[0].obstacle(each) for each in facts} == {None}
    else:
        setting, job, fragment = entry.refusal
        sentence = setting.obstacle(record(job()).facts)
        assert fragment in sentence
        assert sentence.endswith(".")


@pytest.mark.parametrize(
    "entry",
    [
        # Whether a loss can be streamed shows only when it is computed: a run goes on without.
        entry
        for entry in ENTRIES
        if entry.refusal is not None
        and entry.strategy.name not in {"linear-cross-entropy", "loss-chunking"}
    ],
    ids=lambda entry: entry.strategy.name,
)
def test_a_run_is_not_started_with_what_is_refused(entry):
    setting, job, fragment = entry.refusal
    with pytest.raises(StrategyError, match=fragment):
        memfit.start(job(), Plan(strategies=(setting,)))


MAY_CHANGE = {
    Seam.MODEL: {"attributes", "members", "values"},
    Seam.FORWARD: {"contexts"},
    Seam.OPTIMIZER: {"groups", "optimizer", "optimizer step", "update contexts"},
    Seam.WINDOW: {"gradient_pass", "backward", "update", "stateful", "micro_batch_size"},
    Seam.PROCESS: set(),
}


@pytest.mark.parametrize(("entry", "setting"), CASES_HERE)
def test_it_takes_hold_where_it_says(entry, setting):
    session = session_of(entry.jobs[0]())
    before = snapshot(session)
    undo = setting.apply(session)
    after = snapshot(session)
    undo()
    parts = {part for part in before if part != "values" and before[part] != after[part]}
    if before["values"].keys() != after["values"].keys():
        parts.add("values")
    assert parts <= set().union(*(MAY_CHANGE[seam] for seam in setting.seams))


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting"), CASES_HERE)
def test_undo_puts_everything_back_as_it_was(entry, setting):
    session = session_of(entry.jobs[0]())
    before = snapshot(session)
    undo = setting.apply(session)
    assert not is_same(before, snapshot(session)), (
        "applying it changes nothing, so undo is untested"
    )
    undo()
    assert is_same(before, snapshot(session))


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting"), CASES_HERE)
def test_undo_puts_everything_back_after_steps_under_it(entry, setting):
    job = entry.jobs[0]()
    session = session_of(job)
    undo = setting.apply(session)
    session.gradient_pass(session, job.batch(job.batch_size), lambda phase: None)
    session.update(session)
    undo()
    fresh = snapshot(session_of(job))
    after = snapshot(session)
    for key in ("groups", "contexts", "micro_batch_size", "gradient_pass", "backward", "update"):
        assert after[key] == fresh[key]
    for name, attributes in fresh["attributes"].items():
        assert after["attributes"][name].keys() == attributes.keys()
    assert after["members"].keys() == fresh["members"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting", "job"), CASES_AND_JOBS_HERE)
def test_the_results_are_those_of_the_plain_step(entry, setting, job):
    dtype, tolerance = TOLERANCES[setting.numerics]
    found = memfit.verify(job(), Plan(strategies=(setting,)), dtype=dtype)
    assert found.numerics == str(setting.numerics)
    assert found.loss_error <= tolerance
    assert found.gradient_error <= tolerance, found.worst_gradient
    assert found.parameter_error <= tolerance
    assert found.buffer_error <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "setting"), LARGE_CASES)
def test_the_predicted_peak_is_the_measured_one(entry, setting):
    job, plan = entry.large_job(), Plan(strategies=(setting,))
    predicted = memfit.predict(job, plan=plan)
    measured = memfit.measure(job, plan)
    assert predicted.strategies == measured.strategies == (setting.label(),)
    expected = near_peak(measured.peak_allocated_bytes, entry.peak_tolerance)
    assert predicted.peak_allocated_bytes == expected


@pytest.mark.parametrize(("entry", "setting"), CASES)
def test_settings_survive_saving_and_loading(entry, setting, tmp_path):
    plan = Plan(strategies=(setting,), numerics=setting.numerics)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded == plan
    assert loaded.labels() == plan.labels()


@EACH_ENTRY
def test_an_unknown_setting_is_refused_with_the_known_ones(entry):
    known = entry.settings[0].settings()
    with pytest.raises(StrategyError, match="it has no setting no_such_setting") as caught:
        build_strategy(entry.strategy.name, {**known, "no_such_setting": 1})
    assert all(name in str(caught.value) for name in known)


@EACH_ENTRY
def test_the_numerics_class_is_one_the_suite_can_judge(entry):
    assert entry.strategy.numerics in TOLERANCES
