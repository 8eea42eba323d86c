"""Toy distributions in two dimensions, and one in six, as the generative-model literature has them.

Source of the definitions: Grathwohl et al. 2019, FFJORD, https://arxiv.org/abs/1810.01367, whose
published code draws them; the six-dimensional one is Zhang et al. 2024,
https://arxiv.org/abs/2402.06162, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_Draw = Callable[[np.random.Generator, int], Array]


def draw_toy_set(name: str, num_samples: int, seed: int) -> NDArray[np.float32]:
    """Draw samples of a toy distribution, (samples, 2 or 6)."""
    return TOY_SETS[name](np.random.default_rng(seed), num_samples).astype(np.float32)


def _swiss_roll(rng: np.random.Generator, n: int) -> Array:
    """Two coordinates of a roll with noise 1."""
    turn = 1.5 * np.pi * (1.0 + 2.0 * rng.random(n))
    roll = np.stack((turn * np.cos(turn), turn * np.sin(turn)), axis=1)
    return (roll + rng.normal(size=(n, 2))) / 5.0


def _swiss_roll_6d(rng: np.random.Generator, n: int) -> Array:
    """A roll, three noisy linear functions of it, and a dimension of noise."""
    x, y = _swiss_roll(rng, n).T
    noise = 0.1 * rng.normal(size=(4, n))
    return np.stack(
        (x, y, 2 * x + noise[0], x + y + noise[1], x - 2 * y + noise[2], noise[3]), axis=1
    )


def _circles(rng: np.random.Generator, n: int) -> Array:
    """Two circles, one of half the other's radius."""
    radius: Array = np.where(np.arange(n) % 2 == 0, 1.0, 0.5)
    return 3.0 * (_on_circle(rng.uniform(0, 2 * np.pi, n), radius) + 0.08 * rng.normal(size=(n, 2)))


def _rings(rng: np.random.Generator, n: int) -> Array:
    """Four rings around each other."""
    radius = rng.permutation(np.resize((1.0, 0.75, 0.5, 0.25), n)).astype(np.float64)
    return 3.0 * (_on_circle(rng.uniform(0, 2 * np.pi, n), radius) + 0.08 * rng.normal(size=(n, 2)))


def _moons(rng: np.random.Generator, n: int) -> Array:
    """Two half circles that reach into each other."""
    angle = rng.uniform(0, np.pi, n)
    is_upper = np.arange(n) % 2 == 0
    x = np.where(is_upper, np.cos(angle), 1.0 - np.cos(angle))
    y = np.where(is_upper, np.sin(angle), 0.5 - np.sin(angle))
    points = np.stack((x, y), axis=1) + 0.01 * rng.normal(size=(n, 2))
    return 2.0 * points + np.array([-1.0, -0.2])


def _eight_gaussians(rng: np.random.Generator, n: int) -> Array:
    """Eight Gaussians on a circle."""
    centres = 4.0 * _on_circle(np.arange(8.0) * (np.pi / 4.0), np.ones(8))
    chosen = centres[rng.integers(8, size=n)]
    return (chosen + 0.5 * rng.normal(size=(n, 2))) / 1.414


def _pinwheel(rng: np.random.Generator, n: int) -> Array:
    """Five arms, bent the more the further out they reach."""
    reach = 1.0 + 0.3 * rng.normal(size=n)
    aside = 0.1 * rng.normal(size=n)
    angle = rng.integers(5, size=n) * 2 * np.pi / 5 + 0.25 * np.exp(reach)
    cos, sin = np.cos(angle), np.sin(angle)
    return 2.0 * np.stack((reach * cos + aside * sin, aside * cos - reach * sin), axis=1)


def _two_spirals(rng: np.random.Generator, n: int) -> Array:
    """Two spirals, one the other's reflection in the origin."""
    turn = np.sqrt(rng.random(n)) * 3 * np.pi
    arm = np.stack((-np.cos(turn) * turn, np.sin(turn) * turn), axis=1)
    arm += 0.5 * rng.random((n, 2))
    side = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)[:, None]
    return side * arm / 3.0 + 0.1 * rng.normal(size=(n, 2))


def _checkerboard(rng: np.random.Generator, n: int) -> Array:
    """The dark fields of a board of four by four."""
    x = rng.random(n) * 4.0 - 2.0
    y = rng.random(n) - 2.0 * rng.integers(0, 2, n) + np.floor(x) % 2
    return 2.0 * np.stack((x, y), axis=1)


def _line(rng: np.random.Generator, n: int) -> Array:
    """A diagonal without width."""
    x = rng.random(n) * 5.0 - 2.5
    return np.stack((x, x), axis=1)


def _cosine(rng: np.random.Generator, n: int) -> Array:
    """A wave without width."""
    x = rng.random(n) * 5.0 - 2.5
    return np.stack((x, 2.5 * np.sin(x)), axis=1)


def _on_circle(angle: Array, radius: Array) -> Array:
    return radius[:, None] * np.stack((np.cos(angle), np.sin(angle)), axis=1)


TOY_SETS: Mapping[str, _Draw] = MappingProxyType(
    {
        "swissroll": _swiss_roll,
        "8gaussians": _eight_gaussians,
        "pinwheel": _pinwheel,
        "circles": _circles,
        "moons": _moons,
        "2spirals": _two_spirals,
        "checkerboard": _checkerboard,
        "rings": _rings,
        "line": _line,
        "cos": _cosine,
        "swissroll_6D_xy1": _swiss_roll_6d,
    }
)
