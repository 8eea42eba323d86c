"""Weights are read ahead as their bytes say, while the first one is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from accuracy import cards, errata, packages, read_ahead, rebuild, rows
from accuracy.read_ahead import Paces, Read

from memfit.prediction.recording import record_steps
from memfit.units import MIB

pytestmark = pytest.mark.filterwarnings("default")  # optional packages warn of their own future

ROWS_FOLDER = Path(rows.__file__).with_name("rows")
ROWS = {row.id: row for row in rows.read_rows(ROWS_FOLDER / "fitcheck.jsonl")}
NF4 = ROWS["fitcheck-t4-phase3-2026-09-16-04"]
EQUAL = Paces()


def weights(*sizes_mib: int) -> list[Read]:
    """Return weights that take a quarter once they are quantized."""
    return [
        Read(
            allocation=index,
            num_bytes=size * MIB,
            uses=(100 + index,),
            freed_bytes=size * MIB * 3 // 4,
        )
        for index, size in enumerate(sizes_mib)
    ]


def ahead_of_the_first(*sizes_mib: int, paces: Paces = EQUAL, block_mib: int = 10**6) -> int:
    """Count the weights that lie on the card when the first one is used."""
    order = read_ahead.schedule(weights(*sizes_mib), paces, block_mib * MIB)
    return order.index((True, 0)) - 1


def test_three_readers_read_as_much_as_the_first_weight_has_each():
    # 100 MiB by one reader; ten weights of 10 MiB by each of three, and one that begins
    assert ahead_of_the_first(100, *[10] * 90) == 30 + 4


def test_larger_weights_are_as_many_fewer():
    assert ahead_of_the_first(100, *[50] * 90) == 6 + 4


def test_a_first_weight_that_comes_slowly_lets_others_get_further():
    assert ahead_of_the_first(100, *[10] * 90, paces=Paces(first=1 / 2)) == 60 + 4


def test_beyond_the_first_block_reading_is_slower():
    # Ten weights fill the block of 200 MiB beside the first. From 30, 30 and 40 on, 20 go to each
    # weight, so that the three readers begin four more each by 100, and the first one more then.
    slow = ahead_of_the_first(100, *[10] * 90, paces=Paces(beyond=1 / 2), block_mib=200)
    assert slow < ahead_of_the_first(100, *[10] * 90, paces=EQUAL, block_mib=200) == 34
    assert slow == 10 + 3 * 4 + 1


def test_small_weights_do_not_wait_for_the_driver():
    paces = Paces(beyond=1 / 2)
    assert ahead_of_the_first(10, *[1] * 90, paces=paces, block_mib=12) == 30 + 4


def test_weights_are_used_in_their_order_each_after_it_was_read():
    order = read_ahead.schedule(weights(40, 10, 70, 10, 10, 90, 10), EQUAL, 10**12)
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
        scales_bytes = read.num_bytes // 2 // 64 * 4
        assert read.freed_bytes == read.num_bytes * 3 // 4 - scales_bytes - 64


def test_another_order_has_the_same_events_and_frees_nothing_that_is_not_there(history):
    others = [read_ahead.likely_order(history), *read_ahead.other_orders(history)]
    for other in others:
        assert sorted(other.events) == sorted(history.events)
        alive: set[int] = set()
        for event in other.events:
            if event >= 0:
                alive.add(event)
            else:
                alive.remove(-1 - event)
    assert others[0].events != history.events


def test_a_checkpoint_of_several_files_may_be_read_more_slowly_at_its_beginning(
    history, monkeypatch
):
    num_usual = len(list(read_ahead.other_orders(history)))
    usual = read_ahead.likely_order(history)
    monkeypatch.setattr(read_ahead, "_FILE_BYTES", 1)

    assert len(list(read_ahead.other_orders(history))) == num_usual + 2
    assert read_ahead.likely_order(history).events != usual.events


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
