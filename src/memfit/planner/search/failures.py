"""Words for what could not be recorded."""

from __future__ import annotations


def failure_of(error: Exception) -> str:
    """Quote an error's first line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"the step could not be recorded with it ({said.rstrip('.')})."
