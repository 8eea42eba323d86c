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


@pytest.mark.slow
@given(NAMES, st.lists(st.integers(0, 14), unique=True, max_size=8))
def test_what_is_shortened_is_read_as_the_same_modules(names, numbers):
    names = list(dict.fromkeys([*names, *(f"encoder.layers.{n}.mlp" for n in sorted(numbers))]))
    assert expand_names(shorten_names(names), names) == names


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (
            ["stem", *(f"layers.{n}" for n in range(12)), "layers.14", "layers.15", "head"],
            ("stem", "layers.0-11", "layers.14-15", "head"),
        ),
        ([f"layers.{n}.mlp" for n in range(3)], ("layers.0-2.mlp",)),
        (["10-12.0", "10-12.1"], ("10-12.0-1",)),
        (["l.2", "l.1", "l.3", "l.5"], ("l.2", "l.1", "l.3", "l.5")),
        (["l.0.a", "l.1.b"], ("l.0.a", "l.1.b")),
        (["layer01", "layer02"], ("layer01", "layer02")),
        (["layer09", "layer10"], ("layer09", "layer10")),
        ([], ()),
    ],
)
def test_numbers_that_follow_each_other_are_a_range_without_leading_zeros(names, short):
    assert shorten_names(names) == short


@pytest.mark.parametrize(
    ("patterns", "names", "expanded"),
    [
        (["layers.1-2.mlp"], [f"layers.{n}.mlp" for n in range(3)], ["layers.1.mlp", "layers.2.mlp"]),
        (["10-12.0-1"], ["10-12.0", "10-12.1"], ["10-12.0", "10-12.1"]),  # the last range is meant
        (["l.0-1", "l.1"], ["l.0", "l.1"], ["l.0", "l.1"]),  # each once, though it is named twice
        (["l.0-1"], ["l.0-1", "l.0"], ["l.0-1"]),  # itself, where the model has it
    ],
)  # fmt: skip
def test_a_range_is_read_as_the_modules_that_the_model_has(patterns, names, expanded):
    assert expand_names(patterns, names) == expanded


@pytest.mark.parametrize("pattern", ["l.7", "l.0-2", "l.1-0", "m.0-1", "l.0-"])
def test_what_the_model_does_not_have_is_refused_with_what_is_near(pattern):
    with pytest.raises(ValueError, match=r"no module named .* \(near: "):
        expand_names([pattern], ["l.0", "l.1"])


def test_of_many_names_a_sentence_has_three():
    assert [first_few(list("abcd")[:count]) for count in (0, 1, 3, 4)] == [
        *("", "a", "a, b, c"),
        "a, b, c, ...",
    ]
