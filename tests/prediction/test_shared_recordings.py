"""One recording serves all cards that would have answered alike, and no others."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.catalogue import load_device
from memfit.job import Job, StepBuilder
from memfit.kernels.cuda.card import Card
from memfit.prediction.placed_recorder import card_of
from memfit.prediction.predict import evaluate, evaluate_steps, predict
from memfit.prediction.shared_recordings import SharedRecordings, job_recording
from memfit.session.batches import find_layout
from memfit.strategies.plan import Plan

CARDS = (
    "t4",
    "a100-40gb",
    "a100-80gb",
    "rtx-4090",
    "rtx-4090-d",
    "rtx-4060",
    "h100-80gb",
    "mi300x",
)


def make_card(**facts: Any) -> Card:
    known = {"capability": (8, 0), "torch_version": (2, 13), "num_multiprocessors": 108}
    return Card(**{**known, **facts})


def more_than(number: int, num_multiprocessors: int) -> bool:
    return num_multiprocessors > number


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4096, 256)
        self.layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.head = nn.Linear(256, 512)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.rows(words))).logsumexp(-1).mean()


job = Job(
    model=Net,
    batch=lambda size: torch.randint(4096, (size, 64)),
    loss=lambda model, batch: model(batch),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    batch_size=64,
)


# --- What a card notes ---


def test_a_card_that_was_asked_nothing_else_stands_for_all_of_its_generation() -> None:
    card = make_card(title="A", memory_bytes=1)

    assert card.answers_as(make_card(title="B", memory_bytes=2, num_multiprocessors=20))
    assert not card.answers_as(make_card(capability=(9, 0)))


@pytest.mark.parametrize("fact", ["title", "memory_bytes", "num_multiprocessors"])
def test_a_fact_that_was_looked_at_has_to_be_the_same(fact: str) -> None:
    card = make_card(title="A", memory_bytes=1)
    other = make_card(**{"title": "A", "memory_bytes": 1, fact: 7})
    assert card.answers_as(other)

    getattr(card, fact)

    assert not card.answers_as(other)
    assert card.answers_as(make_card(title="A", memory_bytes=1))


def test_other_multiprocessors_will_do_where_a_rule_comes_to_the_same() -> None:
    card = make_card()
    assert card.by_multiprocessors(partial(more_than, 64))

    assert card.answers_as(make_card(num_multiprocessors=65))
    assert not card.answers_as(make_card(num_multiprocessors=64))


def test_whether_multiprocessors_are_known_is_a_question_too() -> None:
    card = make_card()
    assert card.answers_as(make_card(num_multiprocessors=None))
    assert card.knows_multiprocessors

    assert not card.answers_as(make_card(num_multiprocessors=None))
    assert card.answers_as(make_card(num_multiprocessors=20))


def test_pickling_asks_nothing_and_keeps_what_was_asked() -> None:
    card = make_card(title="A")
    card.by_multiprocessors(partial(more_than, 64))
    again = pickle.loads(pickle.dumps(card))

    assert not again.asked
    assert not again.answers_as(make_card(num_multiprocessors=64))


# --- What is recorded ---


@pytest.mark.slow
def test_shared_recordings_predict_what_each_card_alone_would() -> None:
    shared = SharedRecordings(AllocatorSettings())
    for name in CARDS:
        device = load_device(name)
        replays = shared.of_job(job, Plan(), find_layout(job), device=device)
        found = evaluate(
            job, job_recording(replays), device, Plan(), in_full=True, replays=replays
        ).to_json()
        alone = predict(job, name).to_json()

        for each in (found, alone):
            del each["record_seconds"], each["notes"]
        assert found == alone, name
    assert shared.num_made < len(CARDS), "the two A100 have one at least"


def asking(question: Any) -> StepBuilder:
    def build() -> Any:
        width = question()
        model = nn.Linear(width, width).cuda()
        return lambda: model(torch.randn(2, width, device="cuda")).sum().backward()

    return StepBuilder(name="a step", function=build)


@pytest.mark.parametrize(
    ("question", "num_made"),
    [
        (lambda: 64, 1),
        (lambda: 64 if torch.cuda.get_device_capability() == (8, 0) else 8, 1),
        (lambda: 64 if "80" in torch.cuda.get_device_name() else 8, 2),
        (lambda: torch.cuda.mem_get_info()[0] // 2**30, 2),
        (lambda: torch.cuda.get_device_properties(0).total_memory // 2**30, 2),
        (lambda: torch.cuda.get_device_properties(0).major * 8, 1),
    ],
)
def test_code_that_asks_the_card_is_recorded_again_where_the_answer_differs(
    question: Any, num_made: int
) -> None:
    shared = SharedRecordings(AllocatorSettings())
    found = [
        evaluate_steps(replays.recording, device, replays=replays).peak_allocated_bytes
        for device in map(load_device, ("a100-40gb", "a100-80gb"))
        for replays in [shared.of_steps(asking(question), device)]
    ]

    assert shared.num_made == num_made
    assert len(set(found)) == num_made


@pytest.mark.slow
def test_a_processor_and_a_card_never_share() -> None:
    shared = SharedRecordings(AllocatorSettings())
    for name in ("cpu", "t4", "cpu"):
        shared.of_job(job, Plan(), find_layout(job), device=load_device(name))

    assert shared.num_made == 2
    assert card_of(load_device("cpu")) is None
