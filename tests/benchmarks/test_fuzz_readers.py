"""No reader of a user's files gives way to what no user means: a value, or one line, at once."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from fuzz_readers import BAD, fuzzed, inputs_of, mutated, outcome_of
from fuzz_readers_list import READERS

QUICK = [each for each in READERS if "on a page" not in each.title]
SEED = 20261126


@pytest.mark.parametrize("reader", QUICK, ids=lambda reader: reader.title)
def test_a_reader_gives_a_value_or_one_line_within_a_second(reader):
    tally = fuzzed(reader, SEED, range(12))
    assert not tally.faults
    assert tally.counts.total() == 12
    assert not any(tally.counts[kind] for kind in BAD)


@pytest.mark.parametrize("reader", QUICK, ids=lambda reader: reader.title)
def test_the_files_that_are_changed_can_be_read_as_they_are(reader, tmp_path):
    if reader.title in {"command line", "words of any command"}:
        pytest.skip("its words are drawn")
    for content in reader.contents():
        for name, whole in (*reader.beside, (reader.name.rpartition("/")[2], content)):
            path = (tmp_path / reader.name).with_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole)
        with pytest.warns() if reader.title == "plan" else no_warning():
            reader.read(path)


class no_warning:  # noqa: N801 - it stands where ``warns`` stands
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_an_input_is_the_same_whatever_came_before_it():
    reader = QUICK[0]
    (_, alone), *_ = inputs_of(reader, SEED, range(7, 8))
    assert [*inputs_of(reader, SEED, range(9))][7] == (7, alone)
    assert mutated(b"abc", random.Random(1)) == mutated(b"abc", random.Random(1))


def test_only_what_is_slow_whenever_it_is_read_is_called_slow(tmp_path):
    def takes(*processor_seconds):
        left = iter(processor_seconds)

        def read(_path):
            until = time.process_time() + next(left)
            while time.process_time() < until:
                pass

        return replace(QUICK[0], read=read, most_seconds=0.02)

    assert outcome_of(takes(0.03, 0.0), b"", tmp_path).kind == "read"
    assert outcome_of(takes(0.03, 0.03, 0.03), b"", tmp_path).kind == "slow"
