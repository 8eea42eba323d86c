"""What a row leaves out and its project's own files say: torch's version, the allocator's settings.

torchtitan trains with torch's nightly builds, which its rows do not name: the version is that of
the nightlies in the month of the pull request. Its launcher (run_train.sh, before that
run_llama_train.sh) sets ``expandable_segments:True`` since the summer of 2024.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TITAN_NIGHTLIES = ((300, "2.4"), (700, "2.6"), (860, "2.7"), (1400, "2.8"), (1600, "2.9"))
"""Pull requests up to a number were measured with nightlies that work as a version does. Those of
early July 2025 are called 2.9 and do not fuse RMSNorm yet."""
_TITAN_EXPANDS_SINCE = 400
_EXPANDS = {"pytorch_alloc_conf": "expandable_segments:True"}


def pull_request(fields: Mapping[str, Any]) -> int | None:
    """Return the number of the pull request whose commit was measured; None if there is none."""
    found = re.search(r"PR #(\d+)", fields["source"])
    return int(found[1]) if found else None


def torch_version(fields: Mapping[str, Any]) -> str | None:
    """Return the version that a row states, or that of its day where that is known."""
    stated = re.search(r"\d+\.\d+(\.\d+)?", str(fields.get("torch") or ""))
    if stated:
        return stated[0]
    number = pull_request(fields)
    if "torchtitan" not in fields["source"] or number is None:
        return None
    return next((version for last, version in _TITAN_NIGHTLIES if number <= last), None)


def allocator_settings(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the settings of the allocator under which a row was measured, by their name."""
    number = pull_request(fields)
    if "torchtitan" in fields["source"] and (number is None or number >= _TITAN_EXPANDS_SINCE):
        return _EXPANDS
    return {}
