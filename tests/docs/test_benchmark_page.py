"""The pages show the results that are in the repository."""

import pytest
import write_page


@pytest.mark.parametrize("path", write_page.PAGES, ids=lambda path: path.name)
def test_a_page_is_that_of_the_results(path) -> None:
    text = path.read_text("utf-8")

    assert text == write_page.PAGES[path](text), "run: python benchmarks/write_page.py"
