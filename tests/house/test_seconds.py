"""The list of tests that are not quick names tests that exist; one that has become slow fails."""

from types import SimpleNamespace

import pytest
from tests import conftest, seconds


def test_every_listed_test_exists(request: pytest.FixtureRequest) -> None:
    listed = seconds.listed()
    collected = request.config.stash[seconds.COLLECTED]
    names = collected | {seconds.function_of(name) for name in collected}
    is_whole = "::" not in "".join(request.config.args)
    files = {name.partition("::")[0] for name in collected if is_whole}
    gone = {name for name in listed if not seconds.is_there(name)}
    gone |= {name for name in listed.keys() - names if name.partition("::")[0] in files}

    assert not gone, "run: python tests/seconds.py"
    assert list(listed) == sorted(listed)


@pytest.mark.parametrize(
    "name", ["house/test_seconds.py::test_nobody", "house/nothing.py::test_a[1]"]
)
def test_a_test_that_does_not_exist_is_found(name: str) -> None:
    assert not seconds.is_there(name)
    assert seconds.is_there("house/test_seconds.py::test_a_test_that_does_not_exist_is_found[1]")


def ended(most: float, *marks: str) -> SimpleNamespace:
    """Run a test that does nothing through the hook, and give what the run knows of it."""
    item = SimpleNamespace(
        user_properties=[],
        get_closest_marker=marks.__contains__,
        config=SimpleNamespace(getoption=lambda _: most),
    )
    hook = conftest.pytest_runtest_call(item)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(None)
    return item


def test_a_test_that_takes_too_long_fails_unless_it_is_called_slow() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"list it as slow in tests/seconds\.txt"):
        ended(-1.0)

    assert ended(-1.0, "slow").user_properties
    assert ended(1.0).user_properties[0][0] == seconds.PROPERTY


def test_fast_is_what_is_not_listed_and_the_quickest_of_each_file() -> None:
    listed = {"a.py::one": 0.5, "a.py::two": 0.19, "b.py::two": 0.15, "c.py::one": 2.0}
    names = ["a.py::one", "a.py::two[1]", "b.py::two", "c.py::one", "b.py::one"]

    assert seconds.fast(dict.fromkeys(names, ()), listed) == {"a.py::two[1]", "b.py::one"}


def test_what_needs_a_fixture_that_is_not_quick_is_not_fast() -> None:
    listed = {"a.py@made": 0.19, "b.py@made": 9.0, "b.py::two": 0.15}
    needs = {"a.py::one": ["a.py@made"], "b.py::one": ["b.py@made"], "b.py::two": []}

    assert seconds.fast(needs | {"a.py::two": ["a.py@other"]}, listed) == {"a.py::two", "b.py::two"}
    assert seconds.fast({"a.py::one": ["a.py@made"]}, listed) == {"a.py::one"}
    assert seconds.fast({"b.py::one": ["b.py@made"]}, listed) == set()


@pytest.mark.usefixtures("ask")
def test_a_fixture_is_named_by_its_file(request: pytest.FixtureRequest) -> None:
    assert "conftest.py@ask" in seconds.fixtures_of(request.node)
    assert not [name for name in seconds.fixtures_of(request.node) if name.endswith("@request")]
    assert seconds.is_there("conftest.py@ask")
    assert not seconds.is_there("conftest.py@nobody")


def test_a_long_case_is_named_by_itself() -> None:
    reported = {"a.py::one[1]": 0.02, "a.py::one[2]": 0.04, "a.py::one[3]": 0.2}

    assert seconds.updated({}, reported) == {"a.py::one[3]": 0.2}


def test_a_report_takes_the_place_of_what_was_listed() -> None:
    before = {"a.py::one": 0.2, "a.py::two[1]": 3.0, "b.py::one": 0.25}
    reported = {"a.py::one": 0.01, "a.py::two[2]": 0.14, "a.py::two[3]": 0.18, "a.py::all[1]": 1.0}

    assert seconds.updated(before, reported) == pytest.approx(
        {"a.py::two[1]": 3.0, "a.py::two": 0.16, "b.py::one": 0.25, "a.py::all": 1.0}
    )
