"""Stills random draws: dropout keeps everything, noise is one number at every position."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memfit.trace.modes import OperatorMode

_SHARE = 0.37
"""Where in its range a deterministic draw lies; no special value of any distribution."""
_Draw = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class DeterministicDraws(OperatorMode):
    """Give every random draw a value that depends neither on its position nor on other draws.

    The same samples then give the same loss, however they are grouped. Masks that keep with
    probability p become p, so that dropout leaves its input as it is; a permutation is a reversal.

    Draws from other libraries (numpy, random) are not seen. Of the rarer distributions, those that
    are met are named in ``still_random`` and left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_draws = 0
        self.still_random: set[str] = set()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        draw = _DRAWS.get(name)
        if draw is not None:
            self.num_draws += 1
            return draw(func, args, kwargs)
        if name in _ALWAYS_DRAW:
            self.num_draws += 1
            self.still_random.add(name)
        return func(*args, **kwargs)


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Put the random states of torch, Python and numpy back at the end."""
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    schema = func._schema.arguments
    named = {each.name: each.default_value for each in schema if each.has_default_value()}
    named.update(zip((each.name for each in schema), args, strict=False))
    return {**named, **kwargs}


def _noise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Still a distribution that is not bounded by its arguments."""
    out = func(*args, **kwargs)
    return out.fill_(_SHARE if out.is_floating_point() else 1)


def _uniform(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = _named(func, args, kwargs)
    low, high = named["from"], named["to"]
    return func(*args, **kwargs).fill_(low + _SHARE * (high - low))


def _normal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = _named(func, args, kwargs)
    out = func(*args, **kwargs)
    shifted = torch.as_tensor(named["mean"] + _SHARE * named["std"], dtype=out.dtype)
    return out.copy_(shifted)


def _integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = _named(func, args, kwargs)
    low = named.get("low", named.get("from")) or 0
    high = named.get("high", named.get("to"))
    return func(*args, **kwargs).fill_(
        1 if high is None else low + math.floor(_SHARE * (high - low))
    )


def _bernoulli(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the probability in place of a mask; what cannot hold it keeps everything."""
    named = _named(func, args, kwargs)
    chance = named.get("p", args[0])
    out = func(*args, **kwargs)
    if not out.is_floating_point():
        return out.fill_(1)
    return out.copy_(chance) if isinstance(chance, torch.Tensor) else out.fill_(chance)


def _dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Keep everything, scaled as the backward of this operator expects it."""
    named = _named(func, args, kwargs)
    values, rate = named["input"], named["p"]
    if named["train"] is False or rate >= 1.0:
        return func(*args, **kwargs)
    return values / (1.0 - rate), torch.ones_like(values, dtype=torch.bool)


def _permutation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    out = func(*args, **kwargs)
    return out.copy_(torch.arange(len(out) - 1, -1, -1))


def _choice(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Choose the first categories, in order."""
    out = func(*args, **kwargs)
    return out.copy_(torch.arange(out.shape[-1]) % args[0].shape[-1])


_DRAWS: Mapping[str, _Draw] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), _noise),
    **dict.fromkeys(("exponential_", "geometric_", "cauchy_", "log_normal_"), _noise),
    "uniform_": _uniform,
    **dict.fromkeys(("normal", "normal_"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random_"), _integers),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    "native_dropout": _dropout,
    "randperm": _permutation,
    "multinomial": _choice,
}
_ALWAYS_DRAW = (
    "_sample_dirichlet",
    "_standard_gamma",
    "binomial",
    "poisson",
    "rrelu_with_noise",
    "rrelu_with_noise_",
)
