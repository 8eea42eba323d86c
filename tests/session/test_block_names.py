"""Names of modules in short: what is shortened reads as the same modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.session.block_names import expand_names, first_few, shorten_names

NAMES = st.lists(
    st.from_regex(r"(layers?|h\.|10-20\.)?[0-9]{1,2}(\.mlp|\.conv[12]|\.0[12])?", fullmatch=True),
    unique=True,
    max_size=12,
)


@given(NAMES, st.lists(st.integers(0, 14), unique=True, max_size=8))
def test_what_is_shortened_is_read_as_the_same_modules(names, numbers):
    names = list(dict.fromkeys([*names, *(f"encoder.layers.{n}.mlp" for n in sorted(numbers))]))
    assert expand_names(shorten_names(names), names) == names


def test_runs_of_numbered_siblings_are_one_range():
    names = ["stem", *(f"layers.{n}" for n in range(12)), "layers.14", "layers.15", "head"]
    assert shorten_names(names) == ("stem", "layers.0-11", "layers.14-15", "head")


def test_the_number_may_stand_inside_the_name():
    names = [f"layers.{n}.mlp" for n in range(3)]
    assert shorten_names(names) == ("layers.0-2.mlp",)
    assert expand_names(["layers.1-2.mlp"], names) == names[1:]


def test_only_numbers_that_follow_each_other_are_a_range():
    assert shorten_names(["l.2", "l.1", "l.3", "l.5"]) == ("l.2", "l.1", "l.3", "l.5")
    assert shorten_names(["l.0.a", "l.1.b"]) == ("l.0.a", "l.1.b")
    assert shorten_names([]) == ()


def test_numbers_with_leading_zeros_stay_as_they_are():
    for names in (["layer01", "layer02"], ["layer09", "layer10"]):
        assert shorten_names(names) == tuple(names)


def test_only_the_last_of_several_ranges_in_a_name_is_meant():
    names = ["10-12.0", "10-12.1"]
    assert shorten_names(names) == ("10-12.0-1",)
    assert expand_names(["10-12.0-1"], names) == names


def test_each_module_is_given_once_though_it_is_named_twice():
    assert expand_names(["l.0-1", "l.1"], ["l.0", "l.1"]) == ["l.0", "l.1"]


def test_a_name_that_looks_like_a_range_is_itself_where_the_model_has_it():
    assert expand_names(["l.0-1"], ["l.0-1", "l.0"]) == ["l.0-1"]


@pytest.mark.parametrize("pattern", ["l.7", "l.0-2", "l.1-0", "m.0-1", "l.0-"])
def test_what_the_model_does_not_have_is_refused_with_what_is_near(pattern):
    with pytest.raises(ValueError, match=r"no module named .* \(near: "):
        expand_names([pattern], ["l.0", "l.1"])


def test_of_many_names_a_sentence_has_three():
    assert [first_few(list("abcd")[:count]) for count in (0, 1, 3, 4)] == [
        *("", "a", "a, b, c"),
        "a, b, c, ...",
    ]
