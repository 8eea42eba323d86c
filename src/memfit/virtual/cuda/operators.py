"""Puts CUDA's choice of operators where the CPU's would be taken, while a step is recorded.

Composite operators ask the device which kernels to use, and C++ does not see the virtual card.
Each of them is replaced, for the card's tensors alone, at the CPU's autograd key. The replacement
is a registration with torch's dispatcher that ends with the recording; tensors elsewhere take the
path that torch gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.registration import Rule, call_rule
from memfit.virtual.cuda.autocast import VirtualAutocast, operator_called
from memfit.virtual.cuda.placement import is_on_card

_KEY = "AutogradCPU"


@contextmanager
def cuda_choices(card: Card, autocast: VirtualAutocast) -> Iterator[None]:
    """Register CUDA's choices for as long as the context lasts."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, operator in CUDA_OPERATORS.table.items():
            if operator.choice is not None:
                library.impl(name, _on_card_only(name, operator.choice, card), _KEY)
        autocast.register(library)
        yield


def _on_card_only(name: str, choice: Rule, card: Card) -> Callable[..., Any]:
    """Leave tensors that are not on the card to torch's own operator."""
    operator = operator_called(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_on_card(args[0]):
            out = call_rule(choice, operator, args, kwargs, card=card)
            if out is not NotImplemented:
                return out
        return operator._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return kernel
