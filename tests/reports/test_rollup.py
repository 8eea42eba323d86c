"""Modules of one kind are one group, and nothing is lost or counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.reports.rollup import ModuleGroup, down_to, rolled_up, unfolded
from memfit.units import MIB

GPT = {
    "": 7 * MIB,
    "wte": 100 * MIB,
    **{f"h.{n}.mlp.c_fc": 30 * MIB for n in range(12)},
    **{f"h.{n}.mlp.c_proj": (5 + (n == 3)) * MIB for n in range(12)},
    **{f"h.{n}": 2 * MIB for n in range(12)},
}


def shown(groups: list[ModuleGroup]) -> list[tuple[str, str]]:
    return [(group.name, group.each) for group in groups]


def test_equal_modules_have_one_figure_and_others_a_range() -> None:
    groups = {group.name: group for _, group in down_to(rolled_up(GPT), 9)}

    assert groups["h.*.mlp.c_fc"].each == "12 x 30.0 MiB"
    assert groups["h.*.mlp.c_proj"].each == "12 x 5.0 to 6.0 MiB"
    assert groups["h.*"].each == "12 x 37.0 to 38.0 MiB"
    assert groups["h.* (itself)"].each == "12 x 2.0 MiB"
    assert groups["wte"].each == ""
    (nearly,) = rolled_up({"a.0.b": 1000 * MIB, "a.1.b": 1009 * MIB})
    assert nearly.each == "2 x about 1,004.5 MiB"
    assert groups["(step)"].total_bytes == 7 * MIB


def test_as_many_rows_are_unfolded_as_there_is_room_for() -> None:
    groups = rolled_up(GPT)

    assert [name for name, _ in shown(unfolded(groups, 3))] == ["h.*.mlp", "wte", "(13 others)"]
    assert shown(unfolded(groups, 5))[:2] == [("h.*.mlp.c_fc", "12 x 30.0 MiB"), ("wte", "")]
    (first, rest) = unfolded(groups, 2)
    assert (first.name, rest.name) == ("h.*", "(2 others)")


def test_a_depth_unfolds_level_by_level() -> None:
    groups = rolled_up(GPT)

    assert [group.name for _, group in down_to(groups, 1)] == ["h.*", "wte", "(step)"]
    names = [(level, group.name) for level, group in down_to(groups, 2)]
    assert names[:3] == [(0, "h.*"), (1, "h.*.mlp"), (1, "h.* (itself)")]


def test_layers_of_a_sequence_stay_apart_unless_they_are_alike() -> None:
    sequence = {"0": 5, "2": 7, "4": 9}
    assert [group.name for group in rolled_up(sequence)] == ["4", "2", "0"]
    heads = {f"heads.{n}": 8 for n in range(4)}
    assert shown(list(rolled_up(heads))) == [("heads.*", "4 x 8 B")]
    inside = {f"blocks.{n}.ff.{place}": 1 + place for n in range(2) for place in range(2)}
    assert [group.name for _, group in down_to(rolled_up(inside), 2)] == [
        "blocks.*.ff",
        "blocks.*.ff.1",
        "blocks.*.ff.0",
    ]


def test_a_number_that_is_the_same_everywhere_stays() -> None:
    parts = {f"0.layer.{n}.fc": 3 for n in range(3)} | {"1.fc": 2}
    assert shown(list(rolled_up(parts))) == [("0.layer.*.fc", "3 x 3 B"), ("1.fc", "")]


def test_what_is_empty_has_no_group() -> None:
    assert rolled_up({}) == ()
    assert rolled_up({"a": 0, "": 0}) == ()
    assert unfolded((), 4) == []


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "2"]), min_size=0, max_size=4).map(".".join)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.dictionaries(NAMES, st.integers(min_value=0, max_value=3), max_size=20))
def test_bytes_add_up_at_every_level(parts: dict[str, int]) -> None:
    groups = rolled_up(parts)

    assert sum(group.total_bytes for group in groups) == sum(parts.values())
    for _, group in down_to(groups, 9):
        if group.below:
            assert sum(each.total_bytes for each in group.below) == group.total_bytes
        assert group.lowest_bytes * group.num_modules <= group.total_bytes
        assert group.total_bytes <= group.highest_bytes * group.num_modules
    for most in (2, 4):
        rows = unfolded(groups, most)
        assert len(rows) <= most
        assert sum(row.total_bytes for row in rows) == sum(parts.values())
