"""Registrations name operators that torch has, and arguments that their schemas have."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from memfit.kernels import cpu_onednn_3_12
from memfit.kernels.cuda import operators
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.registration import Operator, Operators, call_rule

aten = torch.ops.aten
PACKAGES = {"cpu": cpu_onednn_3_12, "cuda": operators}
CONTEXT = {
    "choice": {"card"},
    "fake": {"out"},
    "scratch": {"card", "operands", "out"},
    "product": {"name"},
}


def tables():
    for package in PACKAGES.values():
        for file in iter_modules(package.__path__):
            module = import_module(f"{package.__name__}.{file.name}")
            if hasattr(module, "OPERATORS"):
                yield module.OPERATORS


RULES = [
    pytest.param(name, kind, getattr(operator, kind), id=f"{name}-{kind}")
    for table in tables()
    for name, operator in table.items()
    for kind in CONTEXT
    if getattr(operator, kind) is not None
]


def overloads(name):
    """Return the overloads that a name stands for."""
    packet, _, overload = name.partition(".")
    if packet == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        return [getattr(torch.ops.bitsandbytes, overload).default]
    found = getattr(aten, packet)
    return [getattr(found, each) for each in ([overload] if overload else found.overloads())]


@pytest.mark.parametrize(("name", "kind", "rule"), RULES)
def test_a_rule_names_arguments_of_its_operator_s_schema(name, kind, rule):
    named = {
        parameter.name
        for parameter in inspect.signature(rule).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    schemas = [{each.name for each in func._schema.arguments} for func in overloads(name)]
    assert any(named - CONTEXT[kind] <= schema for schema in schemas), named


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_an_operator_is_registered_in_one_file(package):
    files = [
        import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)
    ]
    names = [name for file in files for name in getattr(file, "OPERATORS", ())]
    assert len(names) == len(set(names)) > 20


def test_a_rule_is_given_what_it_names_by_position_keyword_or_default():
    def rule(*, self, k, dim, card):
        return self, k, dim, card

    assert call_rule(rule, aten.topk.default, (1, 2), {}, card="t4") == (1, 2, -1, "t4")
    assert call_rule(rule, aten.topk.default, (1,), {"k": 3, "dim": 0}, card="t4") == (
        1,
        3,
        0,
        "t4",
    )


def test_a_rule_with_arguments_is_given_all():
    def rule(*, self, **arguments):
        return self, sorted(arguments)

    assert call_rule(rule, aten.mm.default, (1, 2), {}) == (1, ["mat2"])


def test_an_overload_that_lacks_what_a_rule_needs_has_no_rule():
    assert call_rule(lambda *, dim: dim, aten.sum.default, (1,), {}) is NotImplemented
    assert call_rule(lambda *, dim=None: dim, aten.sum.default, (1,), {}) is None


def test_one_overload_goes_before_all_of_its_operator():
    one, every = Operator(), Operator()
    found = Operators({"softmax.int": one, "softmax": every})
    assert found.find(aten.softmax.int) is one
    assert found.find(aten.softmax.int_out) is every
    assert found.find(aten.mm.default) is None


def test_an_in_place_operator_of_cuda_takes_what_its_plain_form_takes():
    plain, in_place = (
        CUDA_OPERATORS.find(func) for func in (aten.cumsum.default, aten.cumsum_.default)
    )
    assert plain.scratch is in_place.scratch is not None


def test_the_cpu_s_room_is_named_after_the_version_of_onednn_that_its_rules_were_read_off():
    found = re.search(r"MKL-DNN v(\d+)\.(\d+)", torch.__config__.show())
    if found is None or not torch.__version__.startswith("2.13."):
        pytest.skip("the rules were read off torch 2.13")
    assert cpu_onednn_3_12.__name__.endswith("_".join(found.groups()))
