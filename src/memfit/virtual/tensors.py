"""Fake tensors: a step is run with shapes only, so that an 8 B model takes megabytes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType, MappingProxyType
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
from memfit.kernels.cpu.scratch import lstm_workspace_bytes
from memfit.kernels.cuda.card import Card
from memfit.trace.modules import OWN_FOLDERS
from memfit.virtual.cache_keys import append_key
from memfit.virtual.cuda.autocast import VirtualAutocast
from memfit.virtual.cuda.distributed import distributed
from memfit.virtual.cuda.operators import cuda_operators
from memfit.virtual.cuda.placement import (
    CARD,
    device_told_to_cpp,
    placement,
    with_device_meant,
)
from memfit.virtual.cuda.recurrent import (
    fake_backward,
    fake_gru_cell,
    fake_gru_cell_backward,
    pack,
    reserve_bytes_of,
    with_reserve,
)
from memfit.virtual.cuda.runtime import runtime
from memfit.virtual.replacements import replacements

_RANGES = (
    torch.ops.aten.linspace.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
)
_UNINITIALISED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_EMPTY = torch.ops.aten.empty.memory_format
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default
_RECURRENT = (_LSTM, _CUDNN_RNN)
_ITEM = torch.ops.aten._local_scalar_dense.default
_ANY_VALUE = 1.0
_SAYS_NO_FAKE = "no fake impl registered"
_PACK = torch.ops.aten._pack_padded_sequence.default
_DEVICE = torch.ops.prim.device.default
_MOST_KNOWN_VALUES = 4096
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


def _no_result(_args: Sequence[object]) -> None:
    """Stand in for an operator that works in place."""


_FAKES = {
    torch.ops.aten._cudnn_rnn_backward.default: fake_backward,
    torch.ops.aten._thnn_fused_gru_cell.default: fake_gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: fake_gru_cell_backward,
    # Optimizers in one kernel, which change their lists of tensors in place.
    torch.ops.aten._fused_sgd_.default: _no_result,
    torch.ops.aten._fused_sgd_.tensor_lr: _no_result,
    torch.ops.aten._fused_adagrad_.default: _no_result,
}
"""What the card's operators give where torch has no fake version of its own."""


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
        if self._has_card and (fake := _FAKES.get(func)) is not None:
            with self:
                return fake(args)
        if func is _PACK and (lengths := _values_of(args[1])) is not None:
            with self:
                return pack(cast(torch.Tensor, args[0]), lengths, batch_first=bool(args[2]))
        args = _with_own_memory(func, args)
        if self._has_card and kwargs.get("device") == CARD:
            args = tuple(self._as_fake(value) for value in args)
        with _without_values(args) if kwargs.get("device") == CARD else nullcontext():
            out: Any = self._carried_out(func, types, args, kwargs)
        if func in _UNINITIALISED:
            # Torch would keep what happens to lie in memory, where it knows the argument's values.
            out.constant = None
        if func in _RANGES and _is_small_and_here(out):
            with no_dispatch():
                out.constant = func(*args, **{**kwargs, "device": "cpu"})
        return self._with_kept(func, types, args, out) if func in _RECURRENT else out

    def _with_kept(
        self, func: Any, types: Sequence[type], args: Sequence[object], out: Sequence[Any]
    ) -> Sequence[Any]:
        """Return recurrent layers what they keep, which torch's own fake versions leave empty."""
        if func is _CUDNN_RNN:
            with self:
                return with_reserve(out, reserve_bytes_of(args))
        num_bytes = lstm_workspace_bytes(tuple(args))
        options = {"dtype": torch.uint8, "device": "cpu"}
        workspace = super().__torch_dispatch__(_EMPTY, types, ([num_bytes],), options)
        return *out[:3], workspace

    def _carried_out(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Have torch do its fake version, and refuse what has none."""
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            # Truths decide what an optimizer does next, numbers only scale its update.
            is_number = func is _ITEM and cast(torch.Tensor, args[0]).is_floating_point()
            if is_number and _is_asked_by_an_optimizer():
                return _ANY_VALUE
            raise
        except UnsupportedOperatorException:
            raise
        except RuntimeError as error:
            if _SAYS_NO_FAKE in str(error):
                raise UnsupportedOperatorException(func) from error
            raise
        if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            raise RecordingError(
                f"The operator {func} gives a sparse tensor, whose size depends on its values",
                "Use dense tensors (for embeddings, sparse=False), or `memfit measure`, which "
                "really runs the step.",
            )
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

    def _prep_args_for_hash(
        self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]
    ) -> None:
        """Describe arguments for torch's cache of fake results."""
        describe = super()._prep_args_for_hash

        def append_other(argument: object) -> None:
            describe(result, (argument,), state, id_hashed_objects)

        if isinstance(args, Mapping):
            result += args
            args = args.values()
        append_key(result, args, self, append_other)

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
            for replacement in replacements(disguised=disguised):
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
    for part in parts:
        for replacement in part:
            stack.enter_context(replacement)
    stack.enter_context(cuda_operators(card, autocast))


def _is_asked_by_an_optimizer() -> bool:
    """Return whether torch's own optimizers want a value, which only scales their updates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return True
        if not file.startswith(OWN_FOLDERS):
            return False
        frame = frame.f_back
    return False


def _is_small_and_here(tensor: object) -> bool:
    """Return whether a tensor of the CPU has few enough values to keep them."""
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


def _with_own_memory(func: Any, args: Sequence[object]) -> Sequence[object]:
    """Copy what an operator changes in place where all is real: torch would really change it.

    They are constants to the recorded code, such as a teacher in a loss's closure.
    """
    if not func._schema.is_mutable:
        return args
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return args
    with no_dispatch(), torch.no_grad():
        return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)


def _values_of(tensor: object) -> list[int] | None:
    """Return the values of a tensor of whole numbers where they are known."""
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


def _operator(error: Exception) -> str:
    func = getattr(error, "func", None)
    return f"The operator {func}" if func is not None else str(error)
