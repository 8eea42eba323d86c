"""Proves, before a set is streamed, that what is cut into chunks is treated row by row."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.analysis.alignment import RecordingsDifferError
from memfit.analysis.flow import Axis, Kind, Problem
from memfit.analysis.judgement import judge
from memfit.analysis.loops import NotRolledError, roll
from memfit.analysis.separability import PROVED, Separability, not_known, refuted, worst_of
from memfit.analysis.use import Sizes
from memfit.errors import JobError, MemfitWarning
from memfit.losses.gradient_sums import leaves_behind, without_hooks
from memfit.separation.called_alone import RecordedCall, followed_rows, record_call
from memfit.separation.recording_scope import undisturbed
from memfit.session.borrowing import code_left_alone
from memfit.virtual.tensors import virtual_tensors

_FOUND: dict[Hashable, Separability] = {}
_MOST_FOUND = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCall:
    """A call whose rows are to be computed a few at a time."""

    call: Callable[..., Any]
    """(tensors that are cut, the others) to a tree of tensors."""
    cut: Sequence[Tensor]
    """Cut along dimension 0."""
    others: Sequence[Tensor] = ()
    row_dim: int = 0
    """The dimension of the results that runs over the rows."""
    functions: Sequence[object] = ()
    """Those that the call leads to; memfit's own are known to treat rows one by one."""

    @property
    def _code(self) -> tuple[object, ...]:
        """List the functions that are none of memfit's own."""
        given = [each for each in self.functions if each is not None]
        return tuple(each for each in given if not _module_of(each).startswith("memfit."))

    def check(self, part: int) -> None:
        """Refuse to cut rows that meet one another; warn where that could not be followed.

        Raises:
            JobError: if rows meet.
        """
        shapes = [(each.shape, each.dtype) for each in (*self.cut, *self.others)]
        key = (part, self.row_dim, *shapes, *_marks_of(self._code))
        if key not in _FOUND:
            if len(_FOUND) >= _MOST_FOUND:
                _FOUND.clear()
            _FOUND[key] = self.separability(part)
            if not (_FOUND[key].is_proved or _FOUND[key].is_refuted):
                warnings.warn(_UNKNOWN.format(_FOUND[key].sentence), MemfitWarning, stacklevel=4)
        if _FOUND[key].is_refuted:
            raise JobError(_MIXED.format(len(self.cut[0]), part, _FOUND[key].sentence))

    def separability(self, part: int) -> Separability:
        """Return whether the rows stay apart, forward and backward, in chunks of so many.

        The call is recorded on fake tensors with all rows, with those of a chunk and of the last
        one, and followed row by row.
        """
        if not self._code:
            return PROVED
        num_rows = len(self.cut[0])
        mode = next((t.fake_mode for t in self.cut if isinstance(t, FakeTensor)), None)
        device_type = self.cut[0].device.type
        autocast = partial(torch.autocast, device_type, torch.get_autocast_dtype(device_type))
        is_cast = torch.is_autocast_enabled(device_type)
        counts = {part, num_rows % part} - {0}
        if 1 in counts and num_rows > 2:  # of which a single row may show nothing
            counts.add(2)
        try:
            with (
                undisturbed(),
                torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is),  # none of others
                code_left_alone("prepare", self._code),
                autocast(enabled=is_cast, cache_enabled=False),
                virtual_tensors() if mode is None else mode,
            ):
                whole = self._recorded(num_rows)
                return worst_of([self._judged(whole, count) for count in counts])
        except Exception as error:  # noqa: BLE001 - whatever the caller's code may raise
            return not_known(_cannot_be_recorded(error))

    def _recorded(self, num_rows: int) -> RecordedCall:
        cut = [_stand_in(each, (num_rows, *each.shape[1:])) for each in self.cut]
        others = [_stand_in(each, each.shape) for each in self.others]
        given = (*cut, *others)

        def parameters(results: Sequence[Tensor]) -> Mapping[str, Tensor]:
            found = [each for each in leaves_behind(results) if all(each is not g for g in given)]
            stack.enter_context(without_hooks(found))  # they are for whole gradients
            return {f"parameter {at}": each for at, each in enumerate(found)}

        outlive = {f"the tensor {at} that is given": each for at, each in enumerate(given)}
        with ExitStack() as stack:
            return record_call(
                lambda: self.call(cut, others),
                given,
                outlive,
                parameters,
                num_rows / len(self.cut[0]),
                code=self._code,
            )

    def _judged(self, whole: RecordedCall, num_rows: int) -> Separability:
        sizes = Sizes(len(self.cut[0]), num_rows)
        try:
            part = self._recorded(num_rows)
        except Exception as error:  # noqa: BLE001 - whatever the caller's code may raise
            return not_known(_cannot_be_recorded(error))
        try:
            return self._followed(whole, part, sizes)
        except RecordingsDifferError as error:
            place = error.culprit.place()
            if num_rows == 1:  # torch takes other ways for one row, which need not mean much
                return not_known(f"{place} is not the same for a single row", error.culprit)
        try:
            whole = replace(whole, dataflow=roll(whole.dataflow, sizes.first))
            part = replace(part, dataflow=roll(part.dataflow, sizes.second))
            return self._followed(whole, part, sizes)
        except (NotRolledError, RecordingsDifferError):
            return refuted(f"{place} is not the same for fewer rows")

    def _followed(self, whole: RecordedCall, part: RecordedCall, sizes: Sizes) -> Separability:
        num_cut = len(self.cut)
        dims = {number: 0 if at < num_cut else None for at, number in enumerate(whole.inputs)}
        followed = followed_rows(whole, part, sizes, dims)
        for number in (*whole.results, *whole.gradients_of_inputs, *whole.ends.gradients.values()):
            flow = followed.flows[number]
            if flow.problem is not None:
                verdict = refuted if flow.kind is Kind.MIXED else not_known
                return verdict(_of_rows(flow.problem), flow.problem.culprit)
        for write in followed.writes:
            sentence = f"{write.culprit.place()} writes into a tensor that later chunks read"
            return refuted(sentence, write.culprit)
        for number in whole.results:
            axes = followed.flows[number].axes
            axis = axes[self.row_dim] if len(axes) > self.row_dim else None
            if axis is None or not axis.matches(Axis()):
                return refuted(f"a result does not have them in its dimension {self.row_dim}")
        found = judge(followed, whole.ends, part.ends, sizes)
        return found if found.is_proved else replace(found, sentence=found.sentence.rstrip("."))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _of_rows(problem: Problem) -> str:
    """Say of the rows of a set what the analysis says of the samples of a batch."""
    words = {r"the batch size": "the number of rows", r"batch(?! norm)": "set", r"sample": "row"}
    sentence = problem.sentence
    for word, other in words.items():
        sentence = re.sub(rf"\b{word}", other, sentence)
    return f"{problem.culprit.place()} {sentence}"


def _module_of(function: object) -> str:
    return getattr(function, "__module__", None) or ""


def _cannot_be_recorded(error: Exception) -> str:
    return f"they cannot be recorded: {error}".rstrip(".")


def _stand_in(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(made.is_floating_point())


def _marks_of(functions: Sequence[object]) -> Iterator[Hashable]:
    """Yield what tells functions apart that may treat rows in different ways.

    It is their code, the modules that they lead to, and what these have that is true or false.
    """
    waiting, seen = list(functions), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (Tensor, type)):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for module in value.modules():
                yield weakref.ref(module)
                yield tuple(each for each in vars(module).values() if type(each) is bool)
            continue
        code = getattr(value, "__code__", None)
        yield value if isinstance(value, bool) else code or weakref.ref(type(value))
        waiting += _leads_to(value)


def _leads_to(value: object) -> Iterator[object]:
    """Yield what a function, or another object that can be called, may call."""
    if isinstance(value, FunctionType):
        used = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (each for each in used if isinstance(each, (nn.Module, FunctionType)))
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif callable(value):
        yield from getattr(value, "__dict__", {}).values()


_MIXED = (
    "{} rows are to be computed in chunks of {}, which gives the same only if each is computed by "
    "itself, and they meet: {}. Batch normalisation can be frozen with .eval(); otherwise leave "
    "the chunk size out."
)
_UNKNOWN = (
    "It could not be followed whether chunks give what the whole set gives: {}. Compare a step "
    "with one without a chunk size before relying on it."
)
