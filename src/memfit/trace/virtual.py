"""Fake tensors: a step is carried out with shapes only, so that an 8 B model takes megabytes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from memfit.errors import RecordingError
from memfit.trace.cuda.autocast import VirtualAutocast
from memfit.trace.cuda.card import Card
from memfit.trace.cuda.distributed import distributed
from memfit.trace.cuda.operators import cuda_operators
from memfit.trace.cuda.placement import (
    CARD,
    device_told_to_cpp,
    is_on_card,
    placement,
    with_device_meant,
)
from memfit.trace.cuda.recurrent import fake_backward, pack, reserve_bytes_of, with_reserve
from memfit.trace.cuda.runtime import runtime
from memfit.trace.scratch import lstm_workspace_bytes

_RANGES = (
    torch.ops.aten.linspace.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
)
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_EMPTY = torch.ops.aten.empty.memory_format
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default
_CUDNN_RNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_DEVICE = torch.ops.prim.device.default
_MOST_KNOWN_VALUES = 4096
_RANDOM_STATE_BYTES = 5056
"""Of the CPU's Mersenne Twister (aten/src/ATen/CPUGeneratorImpl.cpp, torch 2.13)."""


class ValuesNeededError(RecordingError):
    """Say which operator needs the values of tensors."""


class VirtualTensors(FakeTensorMode):
    """Make fake tensors, and keep the values of small ones that depend on no input.

    Models look at such values: schedules (``[rate.item() for rate in torch.linspace(...)]``),
    positions, optimizer step counts. They need neither a batch nor noteworthy memory.
    """

    def __init__(self, *, has_card: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._has_card = has_card

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        if func is _DEVICE and not self.in_kernel_invocation:
            return device_told_to_cpp(cast(FakeTensor, args[0]))
        if self._has_card and not self.in_kernel_invocation:
            kwargs = with_device_meant(kwargs)
        if func is _CUDNN_RNN_BACKWARD:
            with self:
                return fake_backward(args)
        if func is _PACK and (lengths := _values_of(args[1])) is not None:
            with self:
                return pack(cast(torch.Tensor, args[0]), lengths, batch_first=bool(args[2]))
        if self._has_card and kwargs.get("device") == CARD:
            args = tuple(self._as_fake(value) for value in args)
        with _without_values(args) if kwargs.get("device") == CARD else nullcontext():
            out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _CUDNN_RNN and is_on_card(args[0]):
            with self:
                return with_reserve(out, reserve_bytes_of(args))
        if func in _RANGES and _is_small_and_here(out):
            with no_dispatch():
                out.constant = func(*args, **{**kwargs, "device": "cpu"})
        if func is _LSTM:
            # torch's own fake version leaves the workspace empty.
            num_bytes = lstm_workspace_bytes(tuple(args))
            options = {"dtype": torch.uint8, "device": "cpu"}
            workspace = super().__torch_dispatch__(_EMPTY, types, ([num_bytes],), options)
            output, hidden, cell, _ = out
            return output, hidden, cell, workspace
        return out

    @property
    def avoid_device_init(self) -> bool:
        """Have torch make tensors on the CPU and move them, as it does without a GPU."""
        return self._has_card or bool(super().avoid_device_init)

    def _as_fake(self, value: object) -> object:
        """Make a real tensor fake; anything else stays."""
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self.from_tensor(value)
        return value

    def may_turn_const(self, tensor: torch.Tensor) -> bool:
        """Keep the values of more than the single numbers that torch keeps."""
        return (
            tensor.numel() <= _MOST_KNOWN_VALUES
            and tensor.layout is torch.strided
            and not isinstance(tensor, FakeTensor)
            and tensor.device.type != "meta"
        )


@contextmanager
def virtual_tensors(
    card: Card | None = None, *, disguised: bool = True
) -> Iterator[FakeTensorMode]:
    """Make every tensor inside a fake one: it has a shape, a dtype and a device, and no memory.

    Args:
        card: the GPU that ``cuda`` means inside; without one there is none.
        disguised: have libraries that treat fake tensors specially take their usual path.

    Raises:
        ValuesNeededError: if the code inside needs the values of tensors.
        RecordingError: if an operator has no fake implementation.
    """
    mode = VirtualTensors(has_card=card is not None)
    try:
        with ExitStack() as stack:
            # What fails is reported by whoever catches it, not by torch's log as well.
            stack.enter_context(patch.object(_FAKE_TENSOR_LOG, "disabled", True))
            for replacement in _replacements(disguised):
                stack.enter_context(replacement)
            if card is not None:
                _enter_card(stack, card)
            with mode:
                yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValuesNeededError(
            f"{_operator(error)} depends on the values of tensors, which are not there yet",
            "Take it out of the step (compute it with the batch, or with shapes only), or use "
            "`memfit measure`, which really runs the step.",
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise RecordingError(
            f"{_operator(error)} has no fake implementation",
            "Register one with torch.library.register_fake, or use `memfit measure`.",
        ) from error


def _enter_card(stack: ExitStack, card: Card) -> None:
    """Put a virtual GPU into the machine."""
    autocast = VirtualAutocast(card.torch_version)
    parts = (placement(), runtime(card), autocast.replacements(), distributed())
    for replacements in parts:
        for replacement in replacements:
            stack.enter_context(replacement)
    stack.enter_context(cuda_operators(card, autocast))


def _is_small_and_here(tensor: object) -> bool:
    """Say whether a tensor of the CPU has few enough values to keep them."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_device.type == "cpu"
        and tensor.numel() <= _MOST_KNOWN_VALUES
    )


@contextmanager
def _without_values(args: Sequence[object]) -> Iterator[None]:
    """Hide the values that are known of some tensors: those of the card's tensors are not kept."""
    known = [tensor for tensor in args if isinstance(tensor, FakeTensor)]
    values = [tensor.constant for tensor in known]
    for tensor in known:
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, value in zip(known, values, strict=True):
            tensor.constant = value


def _values_of(tensor: object) -> list[int] | None:
    """Give the values of a tensor of whole numbers where they are known."""
    constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
        return None
    with no_dispatch():
        values: list[int] = constant.tolist()
    return values


def as_virtual(mode: FakeTensorMode, values: object) -> object:
    """Turn the real tensors in a pytree into fake ones; fake ones are made the mode's own."""
    return tree_map_only(torch.Tensor, lambda tensor: _one_as_virtual(mode, tensor), values)


def _one_as_virtual(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Make a fake tensor like another one, with a storage of its own."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _replacements(disguised: bool) -> Iterator[Any]:
    """Replace functions that cannot or need not do their work on fake tensors."""
    # Truncated normals are drawn by rejection, which looks at the values drawn.
    yield patch.object(torch.nn.init, "_no_grad_trunc_normal_", _leave_as_is)
    # Fake parameters can be neither swapped nor given other data: put new ones in their places.
    yield patch.object(torch.nn.Module, "_apply", _ConvertedInPlace().apply)
    # The random state does not pass through dispatch, but it takes memory.
    for module in (torch, torch.random):
        yield patch.object(module, "get_rng_state", _random_state)
        yield patch.object(module, "set_rng_state", _drop_state)
    # transformers builds attention masks for fake tensors that it leaves out for real ones.
    library = sys.modules.get("transformers.utils.import_utils")
    if disguised and hasattr(library, "is_fake_tensor"):
        yield patch.object(library, "is_fake_tensor", _say_no)


class _ConvertedInPlace:
    """Stand in for ``Module._apply``, which ``.to()``, ``.half()`` and their kin go through."""

    def __init__(self) -> None:
        self._depth = 0
        self._converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def apply(self) -> Callable[..., torch.nn.Module]:
        """Give the function that takes the method's place."""

        def convert(
            module: torch.nn.Module,
            fn: Callable[[torch.Tensor], torch.Tensor],
            recurse: bool = True,
        ) -> torch.nn.Module:
            self._depth += 1
            try:
                # Through each child's own method: recurrent layers gather their weights anew.
                for child in module.children() if recurse else ():
                    child._apply(fn)
                self._convert_own(module, fn)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._converted.clear()
            return module

        return convert

    def _convert_own(
        self, module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = self._one(tensor, fn)  # type: ignore[assignment]

    def _one(
        self, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Convert a tensor once, however many modules share it."""
        if id(tensor) not in self._converted:
            with torch.no_grad():
                converted = fn(tensor)
            if isinstance(tensor, torch.nn.Parameter) and converted is not tensor:
                converted = torch.nn.Parameter(converted, tensor.requires_grad)
            self._converted[id(tensor)] = (tensor, converted)
        return self._converted[id(tensor)][1]


def _random_state() -> torch.Tensor:
    """Give a tensor as large as the CPU's random state, which checkpointing keeps per block."""
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _drop_state(_state: torch.Tensor) -> None:
    """Take no random state: fake tensors draw nothing."""


def _leave_as_is(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _say_no(_value: object) -> bool:
    return False


def _operator(error: Exception) -> str:
    func = getattr(error, "func", None)
    return f"The operator {func}" if func is not None else str(error)
