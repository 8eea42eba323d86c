"""Weights are read ahead as their bytes say, while the first one is waited for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from accuracy import cards, errata, packages, read_ahead, rebuild, rows, scoring
from accuracy.read_ahead import Read

from memfit.allocator.settings import AllocatorSettings
from memfit.prediction.recording import StepRecording, record_steps
from memfit.trace.events import StepMark
from memfit.units import MIB

pytestmark = pytest.mark.filterwarnings("default")  # optional packages warn of their own future

ROWS_FOLDER = Path(rows.__file__).with_name("rows")
ROWS = {row.id: row for row in rows.read_rows(ROWS_FOLDER / "fitcheck.jsonl")}
NF4 = ROWS["fitcheck-t4-phase3-2026-09-16-04"]


def weights(*sizes_mib: int) -> list[Read]:
    """Return weights that are quantized by one event each."""
    return [
        Read(allocation=index, num_bytes=size * MIB, uses=(100 + index,))
        for index, size in enumerate(sizes_mib)
    ]


def ahead_of_the_first(*sizes_mib: int, seconds: list[float] | None = None) -> int:
    """Count the weights that lie on the card when the first one is used."""
    given = seconds or [float(size) for size in sizes_mib]
    return read_ahead.schedule(weights(*sizes_mib), given).index((True, 0)) - 1


def drawn(*sizes_mib: int, first_pace: float = 1.0) -> list[float]:
    """Draw the seconds of weights, in bytes at an average pace."""
    return read_ahead.drawn_seconds(weights(*sizes_mib), first_pace, random.Random(0))


def test_three_readers_read_as_much_as_the_first_weight_has_each():
    # 100 MiB by one reader; ten weights of 10 MiB by each of three, and one that begins
    assert ahead_of_the_first(100, *[10] * 90) == 30 + 4


def test_larger_weights_are_as_many_fewer():
    assert ahead_of_the_first(100, *[50] * 90) == 6 + 4


def test_a_first_weight_that_comes_slowly_lets_others_get_further():
    assert ahead_of_the_first(100, *[10] * 90, seconds=[200.0, *[10.0] * 90]) == 60 + 4


def test_the_pace_of_the_first_weight_is_drawn_outside():
    assert drawn(100, first_pace=1 / 2)[0] == 200 * MIB


def test_weights_that_malloc_maps_anew_take_half_as_long_again():
    sizes = [31, 32]
    for size, pace in zip(sizes, (1.0, read_ahead.MAPPED_PACE), strict=True):
        seconds = drawn(1, *[size] * 4000)[1:]
        average = sum(seconds) / len(seconds) / (size * MIB)
        assert average == pytest.approx(1 / pace, rel=0.03)


def test_small_weights_differ_more_in_their_time_than_those_mapped_anew():
    reused, mapped = (drawn(1, *[size] * 500)[1:] for size in (31, 32))
    assert max(reused) / min(reused) > 2 * max(mapped) / min(mapped)


def test_weights_are_used_in_their_order_each_after_it_was_read():
    sizes = (40, 10, 70, 10, 10, 90, 10)
    order = read_ahead.schedule(weights(*sizes), [float(size) for size in sizes])
    assert [index for is_use, index in order if is_use] == list(range(7))
    assert all(order.index((False, index)) < order.index((True, index)) for index in range(7))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("4.57.1", False), ("5.0.0", True), ("5.3.0", True), ("5.4.0", False), ("5.17.0", False)],
)
def test_quantized_weights_are_read_ahead_from_5_0_to_5_3(version, expected):
    row = replace(NF4, library_versions={"transformers": version})
    assert read_ahead.reads_ahead(row) is expected
    assert not read_ahead.reads_ahead(replace(row, quantization=None))


# --- in a recording ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history():
    """Record the loading of a small 4-bit model on a virtual T4."""
    for name in ("transformers", "peft", "bitsandbytes"):
        try:
            packages.load_package(name)
        except packages.CannotRebuild:
            pytest.skip(f"{name} is not installed")
    sizes = {"num_layers": 2, "vocab_size": 4096, "tie_word_embeddings": True}
    row = replace(NF4, model_config={**NF4.model_config, **sizes}, inputs=NF4.inputs[:1])
    rebuilt = rebuild.rebuild(row)

    def setup():
        rebuilt.setup()
        return lambda: None

    return record_steps(setup, cards.card_of_row(row), num_steps=1).history


def test_all_weights_of_a_checkpoint_are_found_with_what_quantizing_makes(history):
    found = read_ahead.find_reads(history)
    quantized = [read for read in found if read.uses]

    assert len(found) == 1 + 2 * 9 + 1  # the embedding, two layers, the last norm
    assert len(quantized) == 2 * 7
    for read in quantized:
        # scales, packed values and their table come, the weight goes
        assert [use >= 0 for use in read.uses] == [True, True, True, False]


def test_other_orders_have_the_same_events_and_free_nothing_that_is_not_there(history):
    others = list(read_ahead.drawn_orders(history))
    assert len(others) == read_ahead.NUM_DRAWS
    for other in others:
        assert sorted(other.events) == sorted(history.events)
        alive: set[int] = set()
        for event in other.events:
            if event >= 0:
                alive.add(event)
            else:
                alive.remove(-1 - event)
    assert others[0].events != history.events
    again = read_ahead.drawn_orders(history)
    assert [other.events for other in others] == [other.events for other in again]


def test_a_checkpoint_of_several_files_may_be_read_more_slowly_at_its_beginning(
    history, monkeypatch
):
    reads = read_ahead.find_reads(history)
    pace = []
    monkeypatch.setattr(
        read_ahead,
        "drawn_seconds",
        lambda weights, first, generator: pace.append(first) or [1.0] * len(weights),
    )
    usual = list(read_ahead.drawn_orders(history))
    monkeypatch.setattr(read_ahead, "_FILE_BYTES", 1)
    assert len(list(read_ahead.drawn_orders(history))) == len(usual)

    slower = [second / first for first, second in zip(pace, pace[len(usual) :], strict=False)]
    assert all(1 <= first <= 1.4 for first in pace[: len(usual)])
    assert sorted(slower)[len(slower) // 2] == pytest.approx(1 / 3)
    assert len(reads) > 1


def test_the_likely_order_is_in_the_middle_of_what_the_draws_reserve(history):
    recording = StepRecording(
        history=history,
        marks=[StepMark(0, len(history.events), 0, 0)],
        card=None,
        record_seconds=0.0,
    )
    likely, (allocated, reserved) = scoring._as_loaded(NF4, recording, AllocatorSettings(), 0)

    assert len(allocated) == len(reserved) == read_ahead.NUM_DRAWS
    middle = scoring.peaks_alone(likely, AllocatorSettings())[1]
    assert middle == sorted(reserved)[len(reserved) // 2]


# --- what files say wrongly --------------------------------------------------------------------------


def test_the_versions_of_a_file_that_its_readings_contradict_are_put_right():
    sweep = ROWS["fitcheck-t4-sweep-2026-09-15-06"]
    assert sweep.torch_version == "2.10.0+cu128"
    assert sweep.library_versions == {"transformers": "5.0.0", "peft": "0.19.1"}
    assert read_ahead.reads_ahead(sweep)


def test_weights_of_the_first_file_came_one_by_one():
    first = ROWS["fitcheck-t4-qlora-2026-09-01-06"]
    assert not read_ahead.reads_ahead(first)
    assert first.constructor["moved_with"] == "device_map"  # the rest stays


def test_other_files_are_left_alone():
    fields = {"source_path": "data/measurements/t4-phase3-2026-09-16.json#runs[0]", "x": 1}
    assert errata.corrected(fields) == fields
    assert read_ahead.reads_ahead(NF4)
