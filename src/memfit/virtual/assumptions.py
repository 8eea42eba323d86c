"""Answers for values that nobody knows while a step is recorded, and where they were asked for.

Loops log losses, compare them, and route tokens by scores. Nothing of it is known of fake tensors,
and ordinary code goes on whatever the answer is. So an answer is made up, and listed with its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.figures import Answer
from memfit.trace.origins import line_of_caller

Turned = Sequence[tuple[tuple[str, str], float]]
Counts = Mapping[tuple[str, str], int]
"""How often something was answered, by its line and what was asked."""
_VALUES = {
    torch.bool: (True, False),
    torch.float32: (1.0, 1e-30, 500.0),
    torch.int64: (1, 0, 100),
}
"""What single values are taken for: as is likely, then what sends branches another way."""
_SPARSE = "sparse gradients"
"""In the place of a line: an optimizer asks, which is nobody's code here."""
_ATEN = torch.ops.aten


class Assumptions:
    """Make up answers, the same at each time of asking, and list them.

    Args:
        is_skewed: whether routing and masks are as uneven as they can be, rather than balanced:
            the bound above of what depends on them.
        turned: single values that are answered otherwise, by their line and what is asked.
        most_equal: how often a line hears the same value: code that asks until it hears another
            gets another.
    """

    def __init__(
        self, *, is_skewed: bool = False, turned: Turned = (), most_equal: int = 1000
    ) -> None:
        self.is_skewed = is_skewed
        self._most_equal = most_equal
        self._turned = dict(turned)
        self._answers: dict[tuple[str, str], Answer] = {}

    @property
    def answers(self) -> Sequence[Answer]:
        """Return what was answered, in the order of first asking."""
        return tuple(self._answers.values())

    @property
    def counts(self) -> Counts:
        """Return how often each answer was given."""
        return {key: answer.num_times for key, answer in self._answers.items()}

    def stay_equal(self, given: Counts) -> bool:
        """Return whether all would be answered as before if so many were asked for once more."""
        counts = self.counts
        return all(counts[key] + times <= self._most_equal for key, times in given.items())

    def count_again(self, given: Counts) -> None:
        """Count answers as given so many times more."""
        for key, times in given.items():
            answer = self._answers[key]
            self._answers[key] = replace(answer, num_times=answer.num_times + times)

    @property
    def decide_sizes(self) -> bool:
        """Return whether the size of a tensor rests on an answer."""
        return any(answer.decides_sizes for answer in self.answers)

    def number(self, tensor: torch.Tensor) -> float | int | bool:
        """Return the value of a tensor of one element."""
        kind = "truth" if tensor.dtype is torch.bool else "number"
        is_truth, is_float = kind == "truth", tensor.is_floating_point()
        values = _VALUES[torch.bool if is_truth else torch.float32 if is_float else torch.int64]
        line = line_of_caller()
        given = self._turned.get((line, kind), values[0])
        times = self.note(kind, str(given), line=line)
        rounds, is_equal = divmod(times, self._most_equal + 1)
        if is_equal:
            return given
        return [each for each in values if each != given][(rounds - 1) % (len(values) - 1)]

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return values for a whole tensor, on the host."""
        self.note("values", "ones")
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    def num_true(self, mask: torch.Tensor) -> int:
        """Return how many elements of a mask are true: half of them, or all."""
        given = mask.numel() if self.is_skewed else -(-mask.numel() // 2)
        words = "all true" if self.is_skewed else "half of them true"
        self.note("mask", words, decides_sizes=True)
        return given

    def num_different(self, count: int, most: int) -> int:
        """Return how many of some rows of a sparse gradient differ: all that can, or one."""
        bound = min(count, most)
        if bound > 1:
            self._note_rows()
        return min(1, bound) if self.is_skewed else bound

    def num_joined(self, *counts: int) -> int:
        """Return how many rows two sparse gradients have together: all, or where they are alike."""
        if min(counts) > 0:
            self._note_rows()
        return max(counts) if self.is_skewed else sum(counts)

    def _note_rows(self) -> None:
        words = "that all rows are the same" if self.is_skewed else "that all rows differ"
        self.note("rows", words, decides_sizes=True, line=_SPARSE)

    def note(
        self, operator: str, given: str, *, decides_sizes: bool = False, line: str = ""
    ) -> int:
        """List an answer; return how often it was given at this line, the caller's if not said."""
        line = line or line_of_caller()
        before = self._answers.get((line, operator))
        times = before.num_times + 1 if before else 1
        self._answers[line, operator] = Answer(
            source_line=line,
            operator=operator,
            given=given,
            decides_sizes=decides_sizes or (before is not None and before.decides_sizes),
            num_times=times,
        )
        return times

    def comparison(self, func: Any, args: Sequence[Any]) -> bool | None:
        """Return what a comparison of unknown values gives where they are taken to be finite.

        ``isnan``, ``isinf`` and ``isfinite`` are made of these.
        """
        if func in (_ATEN.eq.Tensor, _ATEN.ne.Tensor) and args[0] is args[1]:
            return bool(func is _ATEN.eq.Tensor)
        if func in (_ATEN.eq.Scalar, _ATEN.ne.Scalar) and _is_not_finite(args[1]):
            return bool(func is _ATEN.ne.Scalar)
        if func in (_ATEN.isinf.default, _ATEN.isnan.default):
            return False
        return None

    def indices(self, func: Any, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
        """Return indices for what chooses among unknown scores, by their place in the results."""
        rule = _CHOICES.get(getattr(func, "overloadpacket", None))
        return {} if rule is None else rule(self, args, out)

    def spread(self, shape: Sequence[int], num_choices: int) -> torch.Tensor:
        """Return indices of a shape that fall on each choice equally often, or on the first."""
        count = math.prod(shape)
        flat = torch.arange(count)
        if self.is_skewed:
            width = shape[-1] if shape else 1
            flat = flat % max(1, width)
        return (flat % max(1, num_choices)).reshape(tuple(shape))


def other_values(answer: Answer) -> Sequence[float]:
    """Return what else could be answered for a single value; nothing for other answers."""
    if answer.operator not in ("truth", "number"):
        return ()
    groups = (each for each in _VALUES.values() if answer.given in map(str, each))
    return [value for group in groups for value in group if str(value) != answer.given]


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _size(args: Sequence[Any], dim: Any) -> int:
    shape = args[0].shape
    if not shape:
        return 1
    return int(shape[dim]) if isinstance(dim, int) else math.prod(shape)


def _argument(args: Sequence[Any], place: int, default: Any) -> Any:
    return args[place] if len(args) > place else default


def _top_k(assumed: Assumptions, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
    dim = _argument(args, 2, -1)
    num_choices = _size(args, dim)
    last = out[1].movedim(dim, -1).shape if out[1].dim() else out[1].shape
    indices = assumed.spread(last, num_choices)
    return {1: indices.movedim(-1, dim).contiguous() if out[1].dim() else indices}


def _sort(_assumed: Assumptions, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
    dim = next((each for each in args[1:] if type(each) is int), -1)
    shape = out[1].shape
    if not shape:
        return {1: torch.zeros((), dtype=torch.int64)}
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return {1: torch.arange(shape[dim]).reshape(view).expand(shape).contiguous()}


def _arg_max(assumed: Assumptions, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
    return {0: _one_choice(assumed, out.shape, _size(args, _argument(args, 1, None)))}


def _max(assumed: Assumptions, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
    if not isinstance(out, tuple):
        return {}
    return {1: _one_choice(assumed, out[1].shape, _size(args, _argument(args, 1, -1)))}


def _draws(assumed: Assumptions, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
    return {0: assumed.spread(out.shape, _size(args, -1))}


def _one_choice(assumed: Assumptions, shape: Sequence[int], num_choices: int) -> torch.Tensor:
    return assumed.spread((*shape, 1), num_choices).squeeze(-1)


_CHOICES: Mapping[Any, Callable[..., dict[int, torch.Tensor]]] = {
    _ATEN.topk: _top_k,
    _ATEN.sort: _sort,
    _ATEN.argmax: _arg_max,
    _ATEN.argmin: _arg_max,
    _ATEN.max: _max,
    _ATEN.min: _max,
    _ATEN.multinomial: _draws,
}
