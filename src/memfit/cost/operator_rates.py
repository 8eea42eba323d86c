"""What share of a device's rates each class of operators reaches, from one table with sources.

A rate that was measured, by ``memfit calibrate``, is what a large matrix product or a copy reaches.
One of a data sheet is more than that; ``reach`` says by how much.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Self

from memfit.cost.operator_classes import OperatorClass
from memfit.devices.facts import read_fact
from memfit.devices.spec import CPU, CUDA, Fact
from memfit.figures import Certainty

_TABLE = "operator_rates.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRates:
    """What operators reach on one kind of device."""

    product_share: Fact
    """The share of a data sheet's matrix rate that a large product reaches."""
    copy_share: Fact
    """The share of a data sheet's bandwidth that a large copy reaches."""
    classes: Mapping[OperatorClass, Fact]
    """The share of what a large product or copy reaches, whichever binds, by class."""

    @classmethod
    @cache
    def of(cls, kind: str) -> Self:
        """Read the rates on a ``cpu`` or ``cuda`` device."""
        text = (resources.files(__package__) / _TABLE).read_text(encoding="utf-8")
        table = tomllib.loads(text)[CPU if kind == CPU else CUDA]

        def fact(name: str) -> Fact:
            return read_fact(_TABLE, name, table[name])

        classes = {each: fact(each.value) for each in OperatorClass}
        return cls(product_share=fact("matrix"), copy_share=fact("memory"), classes=classes)


def reach(rate: Fact, of_data_sheet: Fact) -> float:
    """Return what can be reached of a rate: all of one that was measured."""
    return 1.0 if rate.certainty == Certainty.EXACT else of_data_sheet.value
