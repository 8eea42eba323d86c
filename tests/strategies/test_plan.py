"""Plans are saved as YAML that people read and edit, and loaded with every fault named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from ruamel.yaml import YAML

import memfit
from memfit import Plan
from memfit.errors import MemfitWarning, PlanFileError, StrategyError
from memfit.strategies import CATALOGUE, build_strategy, strategy_class
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Numerics
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.bf16 import Bf16
from memfit.strategies.facts import JobFacts
from memfit.strategies.loss_chunking import LossChunking, StreamableCandidates
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.plan import RULES, clash, in_catalogue_order, worst_numerics

STRATEGIES = (
    OptimizerImplementation(implementation="loop"),
    ActivationCheckpointing(blocks=("0-2", "head"), keep=("addmm.1",)),
    MicroBatching(micro_batch_size=3),
    Bf16(),
)


@pytest.fixture
def facts() -> JobFacts:
    return JobFacts(
        batch_size=10,
        device_type="cpu",
        batch_norms=(),
        has_dropout=False,
        block_levels=(),
        optimizer="SGD",
    )


PREDICTION = {
    "device": "cpu",
    "batch_size": 4,
    "step_seconds": 0.1,
    "strategies": [],
    "peak_allocated_bytes": 5,
    "peak_reserved_bytes": 5,
    "process_bytes": 9,
    "first_step_peak_bytes": 5,
    "by_category": {},
    "by_module": {},
    "numerics": "exact",
    "certainty": "exact",
}


def test_the_plan_that_does_nothing_can_be_saved_too(tmp_path):
    Plan().save(tmp_path / "plan.yaml")
    assert Plan.load(str(tmp_path / "plan.yaml")) == Plan()


@pytest.mark.slow
def test_a_plan_with_its_prediction_is_plain_yaml(tmp_path, regression_job):
    plan = memfit.plan(regression_job, budget="1MiB")
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert "!!" not in text
    content = YAML(typ="safe", pure=True).load(text)
    assert content["memfit_plan"] == 1
    assert content["prediction"]["peak_allocated_bytes"] == plan.prediction.peak_allocated_bytes
    assert "timeline" not in content["prediction"]
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.strategies == plan.strategies
    before, after = (json.dumps(each.prediction.to_json()) for each in (plan, loaded))
    assert after == before
    assert loaded.prediction.largest[0] == plan.prediction.largest[0]


@pytest.mark.slow
def test_a_prediction_is_kept_for_its_own_strategies_alone(tmp_path, regression_job):
    path = tmp_path / "plan.yaml"
    memfit.plan(regression_job, budget="1MiB", require=["bf16"]).save(path)
    assert Plan.load(path).prediction is not None
    text = path.read_text()
    path.write_text(text.replace("- name: bf16\n", "- name: fp16\n", 1))
    assert "fp16" in Plan.load(path).labels()
    assert Plan.load(path).prediction is None


@pytest.mark.slow
def test_the_file_of_a_model_with_very_many_modules_can_be_read(tmp_path, regression_job):
    prediction = memfit.predict(regression_job)
    modules = {f"layers.{i // 64}.experts.{i % 64}.up": 30_000 - i for i in range(30_000)}
    plan = Plan(prediction=replace(prediction, by_module=modules))
    path = tmp_path / "plan.yaml"
    plan.save(path)
    found = Plan.load(path).prediction
    assert len(found.by_module) == 2_000
    assert sum(found.by_module.values()) == sum(modules.values())
    assert found.by_module["layers.0.experts.0.up"] == 30_000
    assert found.by_module["(other modules)"] > 30_000


def test_a_prediction_of_another_version_is_read_and_a_broken_one_is_refused(tmp_path):
    content = {"memfit_plan": 1, "prediction": {**PREDICTION, "from_the_future": 3}}
    assert Plan.from_json(content).prediction.peak_allocated_bytes == 5
    with pytest.raises(PlanFileError, match=r"the plan: its prediction is malformed \(KeyError"):
        Plan.from_json({"memfit_plan": 1, "prediction": {"peak_allocated_bytes": 5}})
    with pytest.raises(PlanFileError, match="prediction is malformed"):
        Plan.from_json({"memfit_plan": 1, "prediction": "none"})


def test_the_file_begins_with_what_it_is_and_lists_settings_in_order(tmp_path):
    Plan(strategies=STRATEGIES[1:2]).save(tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == (
        "memfit_plan: 1\n"
        "device: cpu\n"
        "ranks: null\n"
        "numerics: exact\n"
        "proof: null\n"
        "reasons: []\n"
        "strategies:\n"
        "- name: activation-checkpointing\n"
        "  blocks:\n"
        "  - 0-2\n"
        "  - head\n"
        "  keep:\n"
        "  - addmm.1\n"
        "prediction: null\n"
        "ladder: []\n"
    )


def test_a_plan_may_be_written_by_hand(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("memfit_plan: 1\nstrategies:\n- {name: micro-batching, micro_batch_size: 8}\n")
    assert Plan.load(path).labels() == ("micro-batching(8)",)


BAD = {
    "empty": ("", "does not say memfit_plan: 1"),
    "list": ("- a\n- b\n", "does not say memfit_plan: 1"),
    "another version": ("memfit_plan: 2\n", "does not say memfit_plan: 1"),
    "no yaml": ("memfit_plan: [1\n", "it is no YAML"),
    "unknown strategy": (
        "memfit_plan: 1\nstrategies:\n- {name: micro-batch}\n",
        "Nearest: micro-batching",
    ),
    "unknown setting": (
        "memfit_plan: 1\nstrategies:\n- {name: bf16, speed: 3}\n",
        "it has no setting speed; it has: keep",
    ),
    "missing setting": (
        "memfit_plan: 1\nstrategies:\n- {name: micro-batching}\n",
        "micro_batch_size",
    ),
    "impossible setting": (
        "memfit_plan: 1\nstrategies:\n- {name: micro-batching, micro_batch_size: 0}\n",
        "at least 1, not 0",
    ),
    "no name": ("memfit_plan: 1\nstrategies:\n- {keep: [addmm.0]}\n", "a strategy needs a name"),
    "bare word": ("memfit_plan: 1\nstrategies:\n- bf16\n", "a strategy needs a name"),
    "strategies are a word": ("memfit_plan: 1\nstrategies: bf16\n", "a strategy needs a name"),
    "numerics": ("memfit_plan: 1\nnumerics: fine\n", "'fine' is not a valid Numerics"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(tmp_path, name):
    content, reason = BAD[name]
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert "`memfit plan --save FILE`" in message
    assert ".." not in message


@pytest.mark.parametrize("value", ["many", "2.5", "true", "[1]"])
def test_a_setting_of_another_type_is_refused_by_its_name(tmp_path, value):
    path = tmp_path / "plan.yaml"
    path.write_text(
        f"memfit_plan: 1\nstrategies:\n- {{name: micro-batching, micro_batch_size: {value}}}\n"
    )
    with pytest.raises(PlanFileError, match="micro_batch_size"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="it is no YAML"):
        Plan.load(tmp_path / "plan.yaml")


def test_a_missing_plan_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(PlanFileError, match="No such file"):
        Plan.load(tmp_path / "absent.yaml")
    with pytest.raises(PlanFileError, match="Is a directory"):
        Plan.load(tmp_path)


# --- Strategies in a plan ---


def test_a_strategy_is_found_by_its_name_and_near_names_are_offered():
    assert [strategy_class(strategy.name) for strategy in CATALOGUE] == list(CATALOGUE)
    with pytest.raises(StrategyError, match="Nearest: activation-checkpointing"):
        strategy_class("gradient-checkpointing")
    with pytest.raises(
        StrategyError, match=r"There are: .*optimizer-implementation, .*loss-chunking"
    ):
        strategy_class("zzz")


CLASHES = {
    "fp16": ["bf16", "pure-bf16", "optimizer-in-backward"],
    "pure-bf16": ["bf16", "optimizer-in-backward", "optimizer-offload"],
    "eight-bit-optimizer": ["optimizer-implementation", "optimizer-offload"],
    "cached-gradients": ["micro-batching", "batchnorm-replay"],
}


@pytest.mark.parametrize(("one", "other"), [(a, b) for a in CLASHES for b in CLASHES[a]])
def test_strategies_that_contradict_each_other_are_not_combined(one, other):
    assert clash([one, other]) is not None


def test_compatibility_rules_name_two_strategies_that_exist_once_and_with_a_reason():
    names = {strategy.name for strategy in CATALOGUE}
    pairs = [frozenset({rule.first, rule.second}) for rule in RULES]
    assert len(pairs) == len(set(pairs))
    for rule in RULES:
        assert rule.first != rule.second
        assert {rule.first, rule.second} <= names
        assert len(rule.reason.split()) > 4
        assert not rule.reason.endswith(".")


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("activation-checkpointing", {"blocks": "0"}, "blocks must be a list of words, not '0'"),
        ("activation-checkpointing", {"keep": [1]}, "keep must be a list of words"),
        ("loss-chunking", {"num_candidates": 0}, "at least 1, not 0"),
        ("batchnorm-replay", {"micro_batch_size": -2}, "at least 1, not -2"),
        ("optimizer-implementation", {"implementation": "gpu"}, "one of fused, foreach, loop"),
        ("activation-offload", {"to": "tape"}, "must be"),
        ("activation-offload", {"min_tensor_bytes": 0}, "must be"),
        ("optimizer-offload", {"to": "moon"}, "host or disk"),
        ("optimizer-offload", {"min_tensor_bytes": 0}, "at least 1"),
        ("tiling", {"num_tiles": 1}, "num_tiles must be at least 2"),
        ("linear-cross-entropy", {"num_rows": 0}, "num_rows must be at least 1"),
    ],
)
def test_an_impossible_setting_is_refused_with_what_is_possible(name, settings, reason):
    with pytest.raises(StrategyError, match=reason):
        build_strategy(name, settings)


def test_labels_show_the_settings():
    assert Plan(strategies=STRATEGIES).labels() == (
        "optimizer-implementation(loop)",
        "activation-checkpointing(blocks=0-2 head, keep=addmm.1)",
        "micro-batching(3)",
        "bf16",
    )


def test_strategies_are_applied_in_the_order_of_the_catalogue():
    assert in_catalogue_order(STRATEGIES[::-1]) == STRATEGIES


def test_a_plan_is_as_exact_as_its_worst_strategy(facts):
    assert worst_numerics((), facts) is Numerics.EXACT
    assert worst_numerics(STRATEGIES[:2], facts) is Numerics.EXACT
    assert worst_numerics(STRATEGIES[:3], facts) is Numerics.UNPROVED, "nobody looked at the step"
    assert worst_numerics(STRATEGIES, facts) is Numerics.APPROXIMATE


def test_numerics_are_ordered_from_harmless_to_not():
    assert sorted(Numerics, key=lambda numerics: numerics.rank) == [
        "exact",
        "same-in-law",
        "unproved",
        "approximate",
        "different",
    ]


@pytest.mark.parametrize("strategy", [MicroBatching, BatchNormReplay])
@pytest.mark.parametrize(
    ("num_samples", "expected"), [(1, []), (2, [1]), (10, [5, 3, 2, 1]), (8, [4, 2, 1])]
)
def test_batches_are_halved_until_one_sample_is_left(facts, strategy, num_samples, expected):
    offered = strategy.options(replace(facts, batch_size=num_samples))
    assert [option.micro_batch_size for option in offered] == expected


def test_losses_are_cut_into_ever_fewer_candidates_down_to_a_useful_size(facts):
    offered = LossChunking.options(replace(facts, own=(StreamableCandidates(40_000, 128),)))
    assert [option.num_candidates for option in offered] == [10_000, 1250, 156]
    few = replace(facts, own=(StreamableCandidates(500, 128),))
    assert list(LossChunking.options(few)) == []


def test_sets_whose_members_are_large_are_cut_down_to_single_ones_but_into_no_more_than_a_thousand(
    facts,
):
    def offered(num_members):
        found = replace(facts, own=(StreamableCandidates(num_members),))
        return [option.num_candidates for option in LossChunking.options(found)]

    assert offered(1000) == [250, 62, 15, 3]
    assert offered(10) == [2]
    assert offered(100_000) == [25_000, 6250, 1562, 390, 97]


@pytest.mark.parametrize(
    ("said", "strategies", "numerics"),
    [
        ("exact", "- name: bf16", Numerics.APPROXIMATE),
        ("same-in-law", "- name: bf16", Numerics.APPROXIMATE),
        ("exact", "- {name: fsdp2, param_dtype: bfloat16}", Numerics.APPROXIMATE),
    ],
)
def test_a_plan_file_that_claims_too_much_is_taken_for_what_it_is(
    tmp_path, said, strategies, numerics
):
    path = tmp_path / "plan.yaml"
    path.write_text(f"memfit_plan: 1\nnumerics: {said}\nstrategies:\n{strategies}\n")
    with pytest.warns(MemfitWarning, match=rf"says numerics: {said}, and with .* is {numerics}\."):
        plan = Plan.load(path)
    assert plan.numerics is numerics


@pytest.mark.parametrize(
    ("said", "numerics"),
    [("", Numerics.APPROXIMATE), ("numerics: different\n", Numerics.DIFFERENT)],
)
def test_a_plan_file_that_claims_nothing_or_less_is_no_surprise(tmp_path, said, numerics):
    path = tmp_path / "plan.yaml"
    path.write_text(f"memfit_plan: 1\n{said}strategies:\n- name: bf16\n")
    assert Plan.load(path).numerics is numerics
