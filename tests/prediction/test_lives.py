"""The lives of blocks add up to the timeline at each of its events."""

from __future__ import annotations

from types import SimpleNamespace

from memfit.allocator.simulate import CUDA_RULES
from memfit.devices.catalogue import load_device
from memfit.prediction.card_replays import timeline_of
from memfit.prediction.lives import lives_of
from memfit.trace.events import Allocation, Category, Phase, Trace


def block(num_bytes: int, phase: Phase, category: Category, module: str = "a") -> Allocation:
    return Allocation(
        num_bytes=num_bytes, operator="", phase=phase, module=module, category=category,
        source_line="model.py:3",
    )  # fmt: skip


TRACE = Trace(
    allocations=[
        block(1000, Phase.SETUP, Category.PARAMETERS),
        block(24, Phase.SETUP, Category.PARAMETERS),
        block(5000, Phase.SETUP, Category.BATCH),
        block(700, Phase.FORWARD, Category.SAVED_ACTIVATIONS),
        block(300, Phase.FORWARD, Category.TEMPORARIES, "b"),
        block(900, Phase.BACKWARD, Category.GRADIENTS),
    ],
    events=[0, 1, 2, 3, 4, -5, -3, 5, -4],
)


def test_at_every_event_the_lives_add_up_to_the_timeline() -> None:
    lives = lives_of(SimpleNamespace(steady=TRACE), load_device("t4"))
    timeline = timeline_of(TRACE, CUDA_RULES)
    assert len(timeline.allocated_bytes) == 7
    for event, total in enumerate(timeline.allocated_bytes):
        alive = [life for life in lives if life.begin <= event < life.end]
        assert sum(life.num_bytes for life in alive) == total
        for name, values in timeline.by_category.items():
            of_it = [life.num_bytes for life in alive if life.category == name]
            assert sum(of_it) == values[event]


def test_what_lasts_the_whole_step_and_is_of_one_kind_is_one_life() -> None:
    lives = lives_of(SimpleNamespace(steady=TRACE), load_device("cpu"))
    (parameters,) = [life for life in lives if life.category == "parameters"]
    assert (parameters.num_bytes, parameters.num_blocks) == (1024, 2)
    assert (parameters.begin, parameters.end) == (0, 7)
    assert parameters.source_line == "model.py:3"
