"""What each case of the exactness corpus declares is what direct computation finds."""

from __future__ import annotations

import pytest
import torch
from exactness import case as case_module
from exactness import parts, registry
from exactness import truth as truths
from results_file import load_result

CASES = registry.all_cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_declares_what_is_true_of_it(case) -> None:
    truth = truths.truth_of(case)

    assert truth.adds == case.adds, truth.cuts
    if case.adds == "no":  # whose draw it is, cannot be told where pieces differ anyway
        assert (truth.draws == "none") == (case.draws == "none")
    else:
        assert truth.draws == case.draws, truth.cuts
    assert truth.effects == case.effects
    assert truth.recompute_unsafe == case.recompute_unsafe, truth.recompute_error
    if not truth.cuts[0].failure:
        assert truth.leaves_same == (case.leaves == "same"), truth.cuts[0]


def test_every_case_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.description for case in CASES)
    assert all(bool(case.source) == (case.half == "public") for case in CASES)


def test_each_half_holds_every_case_that_was_ever_scored() -> None:
    scored = {(row["name"], row["half"]) for row in load_result("exactness")["rows"]}

    assert scored <= {(case.name, case.half) for case in CASES}


def test_in_each_half_many_are_coupled_and_half_are_not() -> None:
    for half in ("blind", "public"):
        adds = [case.adds for case in CASES if case.half == half]
        assert adds.count("mean") >= len(adds) / 2
        assert adds.count("no") >= len(adds) / 5


def test_a_job_of_a_case_is_not_shared_between_two_calls() -> None:
    for case in CASES:
        one, other = case.build(), case.build()
        assert one is not other
        assert one.batch_size % 4 == 0


def made(loss, **declared):
    """Make a case of a loss over a small classifier."""

    def build():
        """Try the computation itself."""
        return parts.make_job(parts.classifier, parts.labelled, loss)

    return case_module.Case(name="made", build=build, half="blind", **declared)


def mean_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_term_of_one_millionth_over_the_batch_is_seen() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) + 1e-6 * model(batch[0]).mean(0).pow(2).sum()

    assert truths.truth_of(made(loss)).adds == "no"
    assert truths.truth_of(made(mean_loss)).adds == "mean"


def test_an_error_between_rounding_and_wrong_is_not_decided() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) + 3e-8 * model(batch[0]).mean(0).pow(2).sum()

    with pytest.raises(truths.UnclearError):
        truths.truth_of(made(loss))


def test_uneven_pieces_are_judged_too() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) * (1.0 if len(batch[0]) % 4 == 0 else 1.5)

    truth = truths.truth_of(made(loss))

    assert truth.adds == "groups"
    assert [sum(cut.counts) for cut in truth.cuts] == [16, 16]


def test_a_case_that_fails_when_it_is_cut_is_coupled() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) + model(batch[0]).view(16, 4).sum() * 0.1

    truth = truths.truth_of(made(loss))

    assert truth.adds == "no"
    assert all("RuntimeError" in cut.failure for cut in truth.cuts)


def test_a_draw_for_the_whole_batch_is_told_from_one_for_each_sample() -> None:
    def shared(model, batch):
        return mean_loss(model, (batch[0] * torch.rand(12), batch[1]))

    def own(model, batch):
        return mean_loss(model, (batch[0] * torch.rand(len(batch[0]), 12), batch[1]))

    assert truths.truth_of(made(shared)).draws == "shared"
    assert truths.truth_of(made(own)).draws == "per-sample"


def test_a_read_of_a_value_is_noted() -> None:
    def loss(model, batch):
        value = mean_loss(model, batch)
        return value if value.item() < 1e6 else value * 0

    assert truths.truth_of(made(loss)).reads_values
    assert not truths.truth_of(made(mean_loss)).reads_values


def test_a_change_in_a_closure_and_in_an_attribute_is_an_effect() -> None:
    seen = []

    def loss(model, batch):
        seen.append(0)
        return mean_loss(model, batch)

    truth = truths.truth_of(made(loss))

    assert truth.effects
    assert not truth.leaves_same


def test_the_global_default_type_is_as_before() -> None:
    truths.truth_of(made(mean_loss))

    assert torch.get_default_dtype() == torch.float32
