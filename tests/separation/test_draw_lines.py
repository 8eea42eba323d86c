"""Draws that no operator shows are told with the line that makes them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np

from memfit.separation.draw_lines import DrawLines

FILE = "/".join(Path(__file__).parts[-2:])


def line_of(words: str) -> str:
    """Return the first line of this file that holds some words."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    return f"{FILE}:{next(n for n, line in enumerate(lines, 1) if words in line)}"


def one_more(number: float) -> float:
    return number + 1.0


def drawing() -> float:
    number = 2.0
    number = one_more(number) + random.uniform(0.0, one_more(number))  # from the library
    number += np.random.rand()  # from numpy
    return number + random.random()  # from the library again


def found_in(function) -> dict[str, str]:
    lines = DrawLines()
    with lines.noted():
        function()
    return lines.found


def test_the_first_line_that_draws_is_named_for_each_library() -> None:
    found = found_in(drawing)

    assert found == {"random": line_of("# from the library"), "numpy": line_of("# from numpy")}


def test_a_step_that_draws_nothing_names_no_line() -> None:
    assert found_in(lambda: one_more(1.0)) == {}


def test_a_tracer_that_was_there_is_there_afterwards() -> None:
    def tracer(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        found_in(drawing)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
