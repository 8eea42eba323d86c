"""What is copied in every step is whole, however cheaply it is copied."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn
from torch.utils._pytree import tree_leaves

import memfit
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.live_state.torch_context import RandomStates
from memfit.runtime.guard.batch_file import BatchFile
from memfit.runtime.guard.fingerprint import Fingerprint
from memfit.session.leaves import bytes_in, is_plain_list, leaves_of

Pair = namedtuple("Pair", "first second")
A, B = torch.zeros(2), torch.ones(3)


@pytest.mark.parametrize(
    "batch",
    [
        A,
        (A, B),
        [A, [B]],
        [],
        {"b": A, "a": B},
        OrderedDict(b=A, a=B),
        {"x": (A, None), "y": 3},
        Pair(A, B),
        (Pair(A, B), {"k": B}),
        "no tensor",
    ],
    ids=str,
)
def test_leaves_are_those_of_the_pytree(batch: Any) -> None:
    assert [*map(id, leaves_of(batch))] == [*map(id, tree_leaves(batch, is_leaf=is_plain_list))]


@pytest.mark.parametrize(
    ("batch", "num_bytes"),
    [
        (torch.zeros(3), 12),
        ([torch.eye(3).to_sparse(), torch.zeros(2)], 4 * (9 + 2)),
        ({"x": [torch.zeros(3), "text"], "y": torch.zeros(2, dtype=torch.int8)}, 14),
        (UserDict(ids=torch.zeros(2, 2), more=(torch.zeros(1), None)), 20),
        (Pair(torch.zeros(2), torch.zeros(1)), 12),
        ("text", 0),
    ],
    ids=str,
)
def test_the_bytes_of_a_batch_are_those_of_its_tensors(batch: Any, num_bytes: int) -> None:
    assert bytes_in(batch) == num_bytes


NUMPYS_DRAWS = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(),
    "one normal": lambda: np.random.randn(),
    "many": lambda: np.random.rand(1000),
    "seeded": lambda: np.random.seed(3),
    "shuffled": lambda: np.random.shuffle([1, 2, 3]),
}
PYTHONS_DRAWS = {
    "nothing": lambda: None,
    "uniform": lambda: random.random(),
    "one normal": lambda: random.gauss(0, 1),
    "shuffled": lambda: random.shuffle([1, 2, 3]),
    "bits": lambda: random.getrandbits(20_000),
    "seeded": lambda: random.seed(3),
    "set": lambda: random.setstate(random.getstate()),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("draws", "state_read", "state", "normal"),
    [
        (NUMPYS_DRAWS, lambda kept: str(kept.numpy), lambda: str(np.random.get_state()), np.random.randn),
        (PYTHONS_DRAWS, lambda kept: kept.python, random.getstate, random.gauss),
    ],
    ids=["numpy", "python"],
)  # fmt: skip
def test_whatever_was_drawn_its_state_is_the_one_read(
    draws: Any, state_read: Any, state: Any, normal: Any, seed: int
) -> None:
    reader, draw = RandomSourcesReader(), random.Random(seed)
    before = reader.here()
    try:
        for _ in range(50):
            draws[draw.choice([*draws])]()
            kept = reader.here()
            assert state_read(kept) == state()
            wanted = [normal() for _ in range(3)]
            if draw.random() < 0.5:
                kept.put_back()
                assert [normal() for _ in range(3)] == wanted
    finally:
        before.put_back()


def test_a_generator_in_the_place_of_pythons_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneOfAUsersOwn(random.Random):
        def getstate(self) -> Any:
            return ("own", super().getstate())

    reader = RandomSourcesReader()
    reader.here()
    own = OneOfAUsersOwn(5)
    monkeypatch.setattr(random, "getstate", own.getstate)
    assert reader.here().python == own.getstate()
    own.random()
    assert reader.here().python == own.getstate()


@pytest.mark.parametrize(
    ("seed", "normal", "state_read"),
    [
        (np.random.seed, np.random.randn, lambda kept: str(kept.numpy)),
        (random.seed, random.gauss, lambda kept: kept.python),
    ],
    ids=["numpy", "python"],
)
def test_a_normal_value_that_was_drawn_in_advance_is_part_of_the_state(
    seed: Any, normal: Any, state_read: Any
) -> None:
    reader = RandomSourcesReader()
    before = reader.here()
    seed(0)
    normal()  # and one more, which lies ready
    ready = reader.here()
    first = normal()  # that one: the generator itself does not move
    used = reader.here()
    second = normal()
    assert state_read(ready) != state_read(used)
    for kept, wanted in ((used, second), (ready, first)):
        kept.put_back()
        assert normal() == wanted
    before.put_back()


def test_another_generator_of_numpys_is_read_as_it_is() -> None:
    before = np.random.get_bit_generator()
    reader = RandomSourcesReader()
    reader.here()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        states = reader.here()
        wanted = np.random.rand(3)
        np.random.set_state(states.numpy)
        assert (np.random.rand(3) == wanted).all()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(100, 40),
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(1000, dtype=torch.bfloat16),
        torch.zeros(500, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(40, 100).t(),
        torch.tensor(0.0),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_change_of_values_shows_without_autograds_notice(tensor: torch.Tensor) -> None:
    before = Fingerprint.of_batch([tensor])
    assert before == Fingerprint.of_batch([tensor])
    tensor.data.fill_(1)
    assert before != Fingerprint.of_batch([tensor])


def test_a_batch_is_read_back_as_it_was_written() -> None:
    file = BatchFile()
    batches: list[Any] = [
        torch.randn(3, 4),
        {"x": torch.arange(5), "flags": torch.tensor([True, False]), "name": "n"},
        (torch.zeros(0, 3), torch.randn(4, 3).t(), torch.randn(2).to(torch.bfloat16)),
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.tensor(2.5),
        [torch.eye(3).to_sparse(), torch.ones(2)],
    ]
    for _ in range(2):  # the second time over the first
        stored = [file.store(copy.copy(batch)) for batch in batches]
        for batch, kept in zip(batches, stored, strict=True):
            found = tree_leaves(file.load(kept))
            for one, other in zip(tree_leaves(batch), found, strict=True):
                assert one is other or (one.dtype == other.dtype and torch.equal(one, other))
        file.clear()
        batches.reverse()


def test_batches_may_hold_sparse_tensors() -> None:
    def batch(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(num_samples, 4), torch.eye(4).to_sparse()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (batch[1] @ model(batch[0]).T).square().mean()

    job = memfit.Job(
        model=lambda: nn.Linear(4, 4),
        batch=batch,
        loss=loss,
        optimizer=torch.optim.AdamW,
        batch_size=4,
    )
    with memfit.start(job) as run:
        losses = [run.step(batch(4)).loss.item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_random_states_that_are_kept_within_a_step_are_part_of_its_peak() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        kept = RandomStates.here(batch)
        value = model(batch).square().mean()
        del kept
        return value

    def peaks(function: Any) -> tuple[int, int | None]:
        job = mean_square_job(lambda: nn.Linear(8, 8), 8, loss=function)
        measured = memfit.measure(job).peak_allocated_bytes
        return memfit.predict(job).peak_allocated_bytes, measured

    predicted, measured = peaks(loss)
    assert abs(predicted - measured) <= 64
    plain, _ = peaks(lambda model, batch: model(batch).square().mean())
    assert predicted - plain > 4000
