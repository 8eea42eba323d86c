"""Which operators CUDA autocast casts, by torch version.

The lists are data (``data/autocast.toml``); this module reads them and applies the changes of each
version, so that a new torch needs a line of data and no code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from memfit.kernels.cuda.card import as_version

POLICIES = (
    "lower_precision",
    "fp32",
    "fp32_set_opt_dtype",
    "fp32_append_dtype",
    "promote",
    "banned",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastLists:
    """The operators of each policy, as the dispatcher names them.

    ``aten::addmm`` is a default overload, ``aten::pow.Tensor_Scalar`` a named one.
    """

    lower_precision: frozenset[str]
    """Cast eligible inputs to the autocast dtype."""
    fp32: frozenset[str]
    """Cast eligible inputs to float32."""
    fp32_set_opt_dtype: frozenset[str]
    """Set ``dtype=float32`` unless the caller gave one."""
    fp32_append_dtype: frozenset[str]
    """Call the overload that takes a dtype, with float32."""
    promote: frozenset[str]
    """Cast inputs to the widest dtype among them."""
    banned: frozenset[str]
    """Refuse under autocast."""

    def policy_of(self, operator: str) -> str | None:
        """Return the policy of an operator, or None where autocast leaves it alone."""
        return next((policy for policy in POLICIES if operator in getattr(self, policy)), None)

    def operators(self) -> frozenset[str]:
        """Return every operator that autocast treats."""
        return frozenset().union(*(getattr(self, policy) for policy in POLICIES))


@cache
def autocast_lists(torch_version: tuple[int, ...]) -> AutocastLists:
    """Return CUDA's autocast lists as of a torch version such as ``(2, 13)``.

    Versions before the oldest one read get the oldest lists, later ones the newest.

    Source: ``data/autocast.toml`` names the files and threads.
    """
    document = _document()
    lists: dict[str, set[str]] = {policy: set(document[policy]) for policy in POLICIES}
    for change in document["changes"]:
        if as_version(change["since"]) <= tuple(torch_version[:2]):
            lists[change["policy"]].update(change.get("added", ()))
            lists[change["policy"]].difference_update(change.get("removed", ()))
    return AutocastLists(**{policy: frozenset(names) for policy, names in lists.items()})


@cache
def _document() -> Mapping[str, Any]:
    """Read the data file."""
    data = resources.files(__package__) / "data" / "autocast.toml"
    return tomllib.loads(data.read_text(encoding="utf-8"))
