"""Classes of transformers, as far as they are installed and can be imported."""

from __future__ import annotations

from typing import Any

import pytest


def part_of_transformers(name: str) -> Any:
    """Return a model or a configuration; skip the test where it is not to be had."""
    library = pytest.importorskip("transformers")
    try:
        return getattr(library, name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers cannot import {name}: {error}")
