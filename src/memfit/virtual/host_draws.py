"""Moves the host's random generator on as a real run would, so that data comes in the same order.

A script that sets a seed shuffles its data the same way each time, after its weights were drawn.
Weights are not drawn on fake tensors. Where they are few enough they are drawn and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memfit.trace.operators import tensors_in

_MOST_NUMBERS = 300_000_000
"""Drawn in all: about two seconds' worth."""
_MOST_AT_ONCE = 64_000_000


class HostDraws:
    """Draw for nothing what a real run would draw on the host, up to a limit.

    Limits: what is drawn from a distribution whose parameters are unknown tensors may take another
    number of draws.

    Args:
        most_numbers: drawn in all; after that the generator stands elsewhere than in a real run.
    """

    def __init__(self, most_numbers: int = _MOST_NUMBERS) -> None:
        self._most_numbers = most_numbers
        self._num_drawn = 0
        self._depth = 0

    @property
    def is_true(self) -> bool:
        """Return whether the generator still stands where that of a real run would."""
        return self._num_drawn <= self._most_numbers

    @property
    def is_inside(self) -> bool:
        """Return whether an operator is being made of others."""
        return self._depth > 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw nothing inside an operator that is made of others: it draws by itself."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def follow(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> None:
        """Draw what an operator would have drawn, if it draws on the host."""
        if self.is_inside or not draws_numbers(func):
            return
        tensors = list(tensors_in(out))
        if not tensors or any(each.device.type != "cpu" for each in tensors):
            return
        count = max(each.numel() for each in tensors)
        self._num_drawn += count
        if not self.is_true or count > _MOST_AT_ONCE:
            self._num_drawn = self._most_numbers + 1
            return
        with no_dispatch(), torch.no_grad():
            real_args, real_kwargs = tree_map_only(FakeTensor, _blank, (tuple(args), dict(kwargs)))
            try:
                func(*real_args, **real_kwargs)
            except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
                self._num_drawn = self._most_numbers + 1

    def truncated(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draw truncated normals, by rejection, for nothing."""
        self._num_drawn += tensor.numel()
        is_here = isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cpu"
        if is_here and self.is_true and tensor.numel() <= _MOST_AT_ONCE:
            with _disable_current_modes():
                _truncated_as_torch_draws(_blank(cast(FakeTensor, tensor)), *args, **kwargs)
        return tensor


_truncated_as_torch_draws: Any = torch.nn.init._no_grad_trunc_normal_


def draws_numbers(func: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _blank(tensor: FakeTensor) -> torch.Tensor:
    """Return real memory like a fake tensor's; its content does not matter."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
