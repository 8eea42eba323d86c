"""The public names: sorted, resolvable, documented, and lazy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.zoo.processes import imports_after

import memfit

ROOT = Path(__file__).parents[2]


def typed_names(source: str) -> set[str]:
    """Read the public names that type checkers see: the re-exports under TYPE_CHECKING."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_the_list_of_public_names_is_sorted_and_without_repeats() -> None:
    assert list(memfit.__all__) == sorted(set(memfit.__all__))


@pytest.mark.parametrize("name", memfit.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(memfit, name)

    if name.startswith("__"):
        assert isinstance(value, str)
    else:
        assert (value.__doc__ or "").strip()
        assert value.__doc__ != type(value).__doc__


def test_type_checkers_see_the_same_names_as_the_run_time() -> None:
    source = Path(memfit.__file__).read_text("utf-8")

    assert typed_names(source) - {"Any", "__version__"} == set(memfit.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        memfit.no_such_name  # noqa: B018 - the access is the test


def test_torch_stays_out_until_it_is_needed() -> None:
    assert imports_after("import memfit", "torch") == set()


def test_names_under_type_checking_are_read() -> None:
    source = "if TYPE_CHECKING:\n    from memfit.job import Job as Job, Total as Sum\nimport os"

    assert typed_names(source) == {"Job", "Sum"}


def test_loading_what_asks_and_trains_draws_no_random_numbers() -> None:
    """A library that draws as it is imported would change the training that asks."""
    program = (
        "import random, memfit; before = random.getstate(); [getattr(memfit, name) for name in"
        " memfit.__all__]; import memfit.listeners; assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
