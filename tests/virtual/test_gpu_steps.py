"""The parts of a step on a virtual GPU: who holds what, when, and what optimizers take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.virtual.steps import FLOAT, on_card, recorded, sizes, training
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.trace.events import Category, Phase
from memfit.virtual.tensors import ValuesNeededError


def peak_bytes(trace) -> int:
    """Return the most that ever lived, without the workspaces of libraries."""
    live = most = 0
    for index, num_bytes in trace.deltas():
        if trace.allocations[index].category is not Category.WORKSPACES:
            live += num_bytes
            most = max(most, live)
    return most


# --- optimizers -----------------------------------------------------------------------------------

PARAMETERS = 100 * 10 + 10
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), PARAMETERS, 0),
    "momentum, fused": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        PARAMETERS,
        0,
    ),
    # The foreach implementation makes one list as large as the parameters: the square roots.
    "adamw": (lambda p: torch.optim.AdamW(p), 2 * PARAMETERS, PARAMETERS),
    "adam with decay": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        2 * PARAMETERS,
        PARAMETERS,  # the decayed gradients are gone before the roots are drawn
    ),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3 * PARAMETERS, PARAMETERS),
    # In one kernel nothing is made; the two step counters lie on the card.
    "adamw, fused": (lambda p: torch.optim.AdamW(p, fused=True), 2 * PARAMETERS + 2, 0),
    # One after the other, the largest parameter has its square root and a quotient.
    "adamw, one by one": (lambda p: torch.optim.AdamW(p, foreach=False), 2 * PARAMETERS, 2000),
    "rmsprop": (lambda p: torch.optim.RMSprop(p), PARAMETERS, PARAMETERS),
}


@pytest.mark.parametrize(("make", "num_states", "num_most"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_takes_what_its_implementation_on_cuda_takes(make, num_states, num_most):
    steady = recorded(training(lambda: nn.Linear(100, 10), 4, 100, optimizer=make))
    assert sum(sizes(steady, category=Category.OPTIMIZER_STATE)) == num_states * FLOAT
    live = most = 0
    for index, num_bytes in steady.deltas():
        if steady.allocations[index].phase is Phase.OPTIMIZER:
            live += num_bytes
            most = max(most, live)
    assert most == num_most * FLOAT


def test_values_that_only_an_optimizer_looks_at_are_not_needed():
    def setup():
        weight = nn.Parameter(on_card(10, 20))
        optimizer = torch.optim.Adafactor([weight])

        def step():
            weight.sum().backward()
            optimizer.step()

        return step

    # A row and a column of second moments.
    states = sizes(recorded(setup), category=Category.OPTIMIZER_STATE)
    assert sorted(states) == [10 * FLOAT, 20 * FLOAT]


def test_an_optimizer_that_decides_by_values_is_refused():
    def setup():
        weight = nn.Parameter(on_card(10))
        optimizer = torch.optim.LBFGS([weight])

        def loss():
            optimizer.zero_grad()
            out = weight.square().sum()
            out.backward()
            return out

        return lambda: optimizer.step(loss)

    with pytest.raises(ValuesNeededError, match="depends on the values"):
        recorded(setup)


# --- a step in parts ------------------------------------------------------------------------------

WIDTH, HIDDEN, BATCH = 16, 64, 4


def perceptron():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def steps_of(body, optimizer=torch.optim.AdamW):
    return training(perceptron, BATCH, WIDTH, body=body, optimizer=optimizer)


def plain(model, batch, optimizer):
    loss = model(batch).square().mean()  # marked: loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


TRAINED = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT


def test_phases_and_categories_are_found_without_being_told():
    steady = recorded(steps_of(plain))
    assert sum(sizes(steady, category=Category.PARAMETERS)) == TRAINED
    assert sum(sizes(steady, category=Category.OPTIMIZER_STATE)) == 2 * TRAINED
    gradients = [a for a in steady.allocations if a.category is Category.GRADIENTS]
    assert sum(a.num_bytes for a in gradients) == TRAINED
    assert {a.phase for a in gradients} == {Phase.BACKWARD}
    # What the gradients of GELU, the second layer and the square need.
    saved = sizes(steady, "gelu", Phase.FORWARD, Category.SAVED_ACTIVATIONS)
    saved += sizes(steady, "addmm", Phase.FORWARD, Category.SAVED_ACTIVATIONS)
    assert saved == [BATCH * n * FLOAT for n in (HIDDEN, HIDDEN, WIDTH)]
    assert sizes(steady, "_foreach_sqrt") == sizes(steady, phase=Phase.OPTIMIZER)


def test_allocations_name_their_module_and_the_line_of_code_in_backward_too():
    steady = recorded(steps_of(plain))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# marked: loss"))
    line = f"virtual/{Path(__file__).name}:{number}"
    products = [a for a in steady.allocations if a.operator in {"addmm", "mm"}]
    assert [(a.module, a.phase) for a in products] == [
        ("0", Phase.FORWARD),
        ("2", Phase.FORWARD),
        ("2", Phase.BACKWARD),
        ("2", Phase.BACKWARD),
        ("0", Phase.BACKWARD),
    ]
    assert {a.source_line for a in products} == {line}
    parameters = [a for a in steady.allocations if a.category is Category.PARAMETERS]
    assert {a.module for a in parameters} == {"0", "2"}


def test_a_name_that_stays_alive_is_in_the_peak():
    wide = 512

    def setup(keep):
        def build():
            model, batch = nn.Linear(8, wide).cuda(), on_card(BATCH, 8)

            def step():
                out = model(batch)
                loss = torch.log_softmax(out, -1).mean()
                if not keep:
                    del out
                loss.backward()

            return step

        return build

    kept, dropped = (peak_bytes(recorded(setup(keep))) for keep in (True, False))
    assert kept - dropped == BATCH * wide * FLOAT


def test_gradients_stay_from_one_micro_batch_to_the_next():
    def accumulate(model, batch, optimizer):
        for half in batch.chunk(2):
            model(half).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def once(model, batch, optimizer):
        model(batch.chunk(2)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    twice = recorded(steps_of(accumulate, torch.optim.Adagrad))
    alone = recorded(steps_of(once, torch.optim.Adagrad))
    assert sum(sizes(twice, category=Category.GRADIENTS)) == TRAINED
    # The second pass makes its gradients anew, and they are added to the first ones.
    made = (sum(sizes(trace, "mm", Phase.BACKWARD)) for trace in (twice, alone))
    assert next(made) == 2 * next(made)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_is_computed_again_in_backward(use_reentrant):
    def step(model, batch, optimizer):
        batch.requires_grad_()
        checkpoint(model, batch, use_reentrant=use_reentrant).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        batch.grad = None

    steady = recorded(steps_of(step))
    hidden = BATCH * HIDDEN * FLOAT
    assert sizes(steady, "gelu", Phase.FORWARD, Category.SAVED_ACTIVATIONS) == []
    assert sizes(steady, "gelu", Phase.BACKWARD, Category.SAVED_ACTIVATIONS) == [hidden]


def test_a_scaled_step_with_clipping_runs_to_its_end():
    def build():
        model = nn.Linear(WIDTH, HIDDEN).cuda()
        batch = on_card(BATCH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()

        def step():
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.is_cuda
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        return step

    steady = recorded(build)
    weights = (WIDTH * HIDDEN + HIDDEN) * FLOAT
    assert sum(sizes(steady, category=Category.GRADIENTS)) == weights
    assert sum(sizes(steady, category=Category.OPTIMIZER_STATE)) == 2 * weights
    # Gradients are scaled and clipped in place; their norms are single numbers.
    norms = sizes(steady, "_foreach_norm")
    assert norms[:2] == [FLOAT, FLOAT]
    assert max(norms) < weights
    assert sizes(steady, "_foreach_sqrt") == [WIDTH * HIDDEN * FLOAT, HIDDEN * FLOAT]
