"""What share of a device's rates each class of operators reaches, from one table with sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from memfit.cost.operator_classes import OperatorClass
from memfit.devices.facts import read_fact
from memfit.devices.spec import CPU, Fact

_TABLE = "operator_rates.toml"


def achieved_share(kind: str, operator_class: OperatorClass) -> float:
    """Return what a class reaches, of the roofline of a device of this kind, once it has begun."""
    return achieved_shares(kind)[operator_class].value


@cache
def achieved_shares(kind: str) -> Mapping[OperatorClass, Fact]:
    """Read the share of every class, ``cpu`` or ``cuda``, each with its source."""
    text = (resources.files(__package__) / _TABLE).read_text(encoding="utf-8")
    table = tomllib.loads(text)["cpu" if kind == CPU else "cuda"]
    return {each: read_fact(_TABLE, each.value, table[each.value]) for each in OperatorClass}
