"""Ordinary jobs whose plans were once called exact and were not: each is refused, or run.

Micro-batching cuts the batch into four pieces. What is refused or not known names operator and
line; what is run ends, in fp64, where the plain step by hand ends.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from exactness import draws, registry, state
from exactness import truth as truths

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.micro_batching import MicroBatching

EXACT = 1e-10

REFUSED = {
    "supervised_contrastive": r"mm at cases/contrastive\.py:\d+ compares samples",
    "triplet_batch_hard": r"cdist_forward at cases/contrastive\.py:\d+ compares samples",
    "hard_examples_topk": r"topk at cases/ranking\.py:\d+",
    "hard_examples_by_share": r"sort at cases/ranking\.py:\d+ works on the whole batch",
    "variance_term_beyond_a_length": r"something else for a batch of .* \(std at cases/ranking\.py",
    "neighbours_by_roll": r"roll at cases/ranking\.py:\d+ moves samples",
    "straight_through_of_a_batch_statistic": r"amax at cases/kept_state\.py:\d+",
    "balance_with_a_tiny_coefficient": r"pow at cases/tokens\.py:\d+ applies a function to a sum",
    "experts_with_a_balance_term": r"mul at cases/sequences\.py:\d+ multiplies sums",
    "vector_quantisation_with_ema": r"outlives it \(lerp at cases/kept_state\.py:\d+\)",
    "running_normalisation": r"add at cases/statistics\.py:\d+",
    "rnn_that_keeps_its_state": r"sets model\.body\.hidden .*\(cases/kept_state\.py:\d+\)",
    "gradient_norm_of_parameters_in_the_loss": r"pow at cases/gradients\.py:\d+",
    "gradient_norm_in_a_hook": r"gradient of 0\.weight .*linalg_vector_norm at exactness/parts\.py",
    "diffusion_with_one_timestep": r"randint at cases/models\.py:\d+ draws random numbers once",
    "listnet_over_group_numbers": r"index at cases/ranking\.py:\d+",
    "ohem_over_pixels": r"topk at cases/ranking\.py:\d+",
    "gradient_clamped_by_a_hook": r"gradient of 0\.weight .*clamp at exactness/parts\.py:\d+",
    "clipped_after_accumulation": r"gradient of 0\.weight .*linalg_vector_norm at exactness/parts",
    "graphs_as_a_disjoint_union": r"index at cases/models\.py:\d+ looks samples up by number",
    "nodes_of_one_graph": r"index at cases/models\.py:\d+ looks samples up by number",
}
"""What cannot be cut, and the operator and line that say so."""

NOT_KNOWN = {
    "counts_its_calls_and_uses_the_count": r"sets model\.0\.1\.calls \(cases/kept_state\.py:\d+\)",
    "masks_from_an_own_numpy_generator": r"at cases/randomness\.py:\d+ reads a tensor made outside",
    "masks_from_random": r"at cases/randomness\.py:\d+ reads a tensor made outside",
    "masks_from_numpy": r"at cases/randomness\.py:\d+ reads a tensor made outside",
    "numpy_draws_in_forward": r"numpy's global generator is drawn from \(cases/randomness\.py:\d+\)",
    "layer_drop_by_random": r"random's global generator is drawn from \(cases/randomness\.py:\d+\)",
    "listnet_over_groups_in_the_batch": r"view at cases/ranking\.py:\d+",
    "class_weights_by_frequency_in_the_batch": r"aten\.bincount.*\(cases/reductions\.py:\d+\)",
    "ohem_by_a_threshold": r"aten\.nonzero.*\(cases/ranking\.py:\d+\)",
    "moco_queue": r"aten\._local_scalar_dense.*\(cases/banks\.py:\d+\)",
    "instance_norm_with_running_statistics": r"native_batch_norm at cases/statistics\.py:\d+",
    "scaled_after_accumulation": r"2\.weight has a hook that is called once its gradient is",
}
"""What is not followed: never chosen unless it is asked for, and tried on the real batch first."""

CARRIED_IN_PIECES = (
    "triplet_given",
    "neighbours_in_time_by_roll",
    "spectral_norm_by_hook",
    "spectral_norm_by_parametrization",
    "counts_its_calls_only",
    "listnet_one_list_per_sample",
    "ohem_within_each_image",
    "ema_teacher_moved_in_forward",
    "instance_norm",
    "gradient_scaled_by_a_hook",
)
SAME_IN_LAW = (
    "dropout_by_function",
    "dropout_layers",
    "dropout_from_an_own_generator",
    "diffusion",
    "flow_matching",
)
RECOMPUTED = (
    "spectral_norm_by_hook",
    "spectral_norm_by_parametrization",
    "counts_its_calls_and_uses_the_count",
    "counts_its_calls_only",
    "rnn_that_keeps_its_state",
    "vector_quantisation_with_ema",
    "running_normalisation",
    "ema_teacher_moved_in_forward",
    "instance_norm_with_running_statistics",
    "dropout_from_an_own_generator",
    "masks_from_an_own_numpy_generator",
    "masks_from_random",
    "masks_from_numpy",
    "layer_drop_by_random",
    "numpy_draws_in_forward",
    "dropout_by_function",
    "gradient_clamped_by_a_hook",
    "clipped_after_accumulation",
)
"""Whose blocks may be run twice in a step that changes what it changes only once."""


@pytest.fixture(autouse=True)
def in_doubles():
    with draws.doubles():
        yield


def pieces(case) -> MicroBatching:
    return MicroBatching(micro_batch_size=case.build().batch_size // 4)


def found_for(case):
    job = case.build()
    return pieces(case).separability(Separation(job, find_layout(job)))


def plainly(case):
    """Run a case's step by hand; return what it leaves."""
    step = truths.build_step(case)
    draws.seed_all()
    loss = step.job.loss(step.model, step.batch)
    (loss.sum / loss.count if isinstance(loss, memfit.Total) else loss).backward()
    step.job.optimizer([p for p in step.model.parameters() if p.requires_grad]).step()
    return step.state()


def planned(case, strategy):
    """Run the same step under a plan; return what it leaves."""
    step = truths.build_step(case)
    run = memfit.start(in_fp64(step), Plan(strategies=(strategy,)), guard=False)
    draws.seed_all()
    run.step(step.batch)
    return step.state()


def in_fp64(step):
    return replace(
        step.job,
        model=lambda: step.model,
        batch=lambda size: truths.as_doubles(step.job.batch(size)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_batch_couples_is_refused_with_operator_and_line(name) -> None:
    case = registry.find_case(name)
    found = found_for(case)

    assert found.is_refuted, found
    step = truths.build_step(case)
    with pytest.raises(StrategyError, match=REFUSED[name]):
        memfit.start(in_fp64(step), Plan(strategies=(pieces(case),)), guard=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_cannot_be_followed_is_not_called_exact_and_says_where(name) -> None:
    found = found_for(registry.find_case(name))

    assert not found.is_proved
    assert not found.is_refuted
    assert re.search(NOT_KNOWN[name], found.sentence), found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", CARRIED_IN_PIECES)
def test_what_samples_do_not_share_ends_where_the_plain_step_ends(name) -> None:
    case = registry.find_case(name)
    found = found_for(case)

    assert found.is_proved, found
    assert not found.draws
    assert max(state.difference(plainly(case), planned(case, pieces(case)))) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_IN_LAW)
def test_draws_of_each_sample_are_the_same_in_law_alone(name) -> None:
    found = found_for(registry.find_case(name))

    assert found.is_proved, found
    assert found.draws


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_blocks_leave_what_the_plain_step_leaves(name) -> None:
    case = registry.find_case(name)
    checkpointing = ActivationCheckpointing(blocks=blocks_of(case))

    assert max(state.difference(plainly(case), planned(case, checkpointing))) <= EXACT


def blocks_of(case) -> tuple[str, ...]:
    model = truths.build_step(case).model
    names = {module: name for name, module in model.named_modules()}
    return tuple(names[block] for block in truths.blocks_of(case, model))
