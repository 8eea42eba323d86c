"""Replaces functions of torch that cannot or need not do their work on fake tensors."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils import flop_counter
from torch.utils._mode_utils import no_dispatch

from memfit.virtual.cuda.placement import is_on_card
from memfit.virtual.data_parallel import data_parallel
from memfit.virtual.exchange import exchange, refuse_if_an_optimizer_holds, take_along_hooks
from memfit.virtual.four_bit import four_bit_weights
from memfit.virtual.fully_sharded import fully_sharded
from memfit.virtual.known_values import VALUE, value_of
from memfit.virtual.process_group import current_placement

_RANDOM_STATE_BYTES = 5056
"""Of the CPU's Mersenne Twister (aten/src/ATen/CPUGeneratorImpl.cpp, torch 2.13)."""


def replacements(*, disguised: bool) -> Iterator[Any]:
    """Yield the replacements.

    Args:
        disguised: have libraries that treat fake tensors specially take their usual path.
    """
    # Truncated normals are drawn by rejection, which looks at the values drawn.
    yield patch.object(torch.nn.init, "_no_grad_trunc_normal_", _leave_as_is)
    # Fake parameters cannot be given other data: they change places with new ones.
    yield patch.object(torch.nn.Module, "_apply", _ConvertedInPlace().apply)
    # A copied storage would be real, and no fake tensor can have one.
    yield patch.object(torch.Tensor, "__deepcopy__", _deep_copy)
    # Copies of a mode's tensors are its tensors; torch would copy the mode with them.
    yield patch.object(FakeTensorMode, "__deepcopy__", _same_mode, create=True)
    # The random state does not pass through dispatch, but it takes memory.
    for module in (torch, torch.random):
        yield patch.object(module, "get_rng_state", _random_state)
        yield patch.object(module, "set_rng_state", _drop_state)
    yield patch.object(torch.Tensor, "numpy", _array_of)
    yield patch.object(FakeTensor, "data_ptr", _no_address, create=True)
    for owner, name, stand_in in _PAST_DISPATCH:
        yield patch.object(owner, name, stand_in)
    yield patch.object(torch.amp.GradScaler, "_maybe_opt_step", _take_step)
    yield patch.object(fake_tensor, "run_fallback_kernel", _refuse_on_card)
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        yield patch.object(flop_counter, name, _for_grouped_queries(getattr(flop_counter, name)))
    yield four_bit_weights()
    yield from data_parallel()
    if current_placement() is not None or "torch.distributed.fsdp" in sys.modules:
        for name in ("_fully_shard._fsdp_init", "_init_utils"):
            sharding = importlib.import_module(f"torch.distributed.fsdp.{name}")
            if hasattr(sharding, "_move_states_to_device"):
                yield patch.object(sharding, "_move_states_to_device", _move_states)
        yield from fully_sharded()
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
        """Return the function that takes the method's place."""

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
                    known_as = f"{type(module).__name__}.{name}"
                    tensors[name] = self._one(known_as, tensor, fn)  # type: ignore[assignment]

    def _one(
        self, name: str, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Convert a tensor once, however many modules share it."""
        if id(tensor) not in self._converted:
            with torch.no_grad():
                converted = fn(tensor)
            if is_lazy(tensor):
                converted.__class__ = type(tensor)
            if isinstance(tensor, torch.nn.Parameter) and converted is not tensor:
                converted = _same_parameter(name, tensor, converted, fn)
            self._converted[id(tensor)] = (tensor, converted)
        return self._converted[id(tensor)][1]


def _move_states(
    params: Sequence[torch.nn.Parameter],
    buffers: Sequence[torch.Tensor],
    device: torch.device | None,
) -> None:
    """Stand in for FSDP's way to the device, which gives tensors other data."""
    for tensor in (*params, *buffers):
        if type(tensor) not in (FakeTensor, torch.nn.Parameter) or tensor.is_meta:
            continue
        if device is None or tensor.device == device:
            continue
        with torch.no_grad():
            moved = tensor.to(device)
        _give_other_data("a parameter that fully_shard moves", tensor, moved)


def _give_other_data(name: str, tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter or a buffer other data under its identity."""
    if isinstance(tensor, torch.nn.Parameter):
        _same_parameter(name, tensor, data, lambda each: each)
    else:
        exchange(tensor, data)


def _same_parameter(
    name: str,
    parameter: torch.nn.Parameter,
    data: torch.Tensor,
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Give a parameter other data, as ``parameter.data = data`` does for real ones.

    Whoever holds it, an optimizer for example, goes on holding the one that is trained. A new one
    is returned where torch refers to it weakly.

    Raises:
        RecordingError: if it does so and an optimizer would go on with the old one.
    """
    is_made = isinstance(data, torch.nn.Parameter)  # by a class that moves in its own way
    other: torch.Tensor = data if is_made else torch.nn.Parameter(data, requires_grad=False)
    gradient, is_trained = parameter.grad, parameter.requires_grad
    take_along_hooks(parameter, other)
    other.requires_grad_(is_trained)
    for key, value in vars(parameter).items():
        vars(other).setdefault(key, value)
    moved: torch.Tensor = parameter
    try:
        exchange(parameter, other)
    except RuntimeError as error:
        refuse_if_an_optimizer_holds(name, parameter, str(error).partition("\n")[0])
        moved = other
    if gradient is not None:
        with torch.no_grad():
            moved.grad = fn(gradient)
    return moved


_deep_copy_as_torch_makes_it: Callable[..., torch.Tensor] = torch.Tensor.__deepcopy__


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Copy a real tensor, such as a buffer of a template, as a fake one; values are not kept.

    Tensors that share memory share it in their copies. The copy of a fake one has its values.
    """
    if id(tensor) in memo:
        return cast(torch.Tensor, memo[id(tensor)])
    if isinstance(tensor, FakeTensor) and isinstance(tensor, torch.nn.Parameter):
        # As ``Parameter.__deepcopy__``: without the gradient, and without a hold on the original.
        values = tensor.detach().clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = parameter = torch.nn.Parameter(values, tensor.requires_grad)
        return parameter
    if isinstance(tensor, FakeTensor) and value_of(tensor) is not None:
        # Torch's way copies the memory of values as if it were that of the fake tensor.
        memo[id(tensor)] = copied = tensor.clone()
        return copied
    is_plain = type(tensor) is torch.Tensor and not (tensor.is_conj() or tensor.is_neg())
    has_memory = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not (is_plain and has_memory and tensor.is_leaf) or tensor.is_quantized:
        if (value := vars(tensor).get(VALUE)) is not None:
            memo[id(value)] = None  # what is known is kept beside one tensor alone
        return _deep_copy_as_torch_makes_it(tensor, memo)
    storage = tensor.untyped_storage()
    # Torch keeps what it has copied of storages in the same place.
    storages = memo.setdefault("torch", {})
    if storage._cdata not in storages:
        memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        storages[storage._cdata] = memory.untyped_storage()
    copied = torch.empty(0, dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        copied.set_(
            storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    vars(copied).update(copy.deepcopy(vars(tensor), memo))
    return copied


def _same_mode(mode: FakeTensorMode, _memo: dict[Any, Any]) -> FakeTensorMode:
    return mode


def _random_state() -> torch.Tensor:
    """Return a tensor as large as the CPU's random state, which checkpointing keeps per block."""
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _drop_state(_state: torch.Tensor) -> None:
    """Take no random state: fake tensors draw nothing."""


def _for_grouped_queries(count: Callable[..., int]) -> Callable[..., int]:
    """Count attention over groups of queries, which older formulas of torch refuse.

    Each query head does its work with a key head, however many share it.
    """

    def counted(*shapes: Sequence[int]) -> int:
        num_heads = max(shape[1] for shape in shapes)
        return count(*((shape[0], num_heads, *shape[2:]) for shape in shapes))

    return counted


_array_as_torch_gives_it = torch.Tensor.numpy
_fallback_as_torch_runs_it = fake_tensor.run_fallback_kernel


def _array_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the values of a tensor as an array, where they are known."""
    if not isinstance(tensor, FakeTensor):
        return _array_as_torch_gives_it(tensor, *args, **kwargs)
    if tensor.constant is None:
        raise DataDependentOutputException("Tensor.numpy")  # type: ignore[arg-type]
    with no_dispatch():
        return _array_as_torch_gives_it(tensor.constant, *args, **kwargs)


def _no_address(_tensor: torch.Tensor) -> int:
    """Return the address that fake tensors have, without torch's warning."""
    return 0


def _refuse_on_card(
    mode: FakeTensorMode, func: Any, flat_args: Sequence[object], *args: Any, **kwargs: Any
) -> Any:
    """Refuse to run an operator on real tensors of the card to learn the shape of its result."""
    if any(is_on_card(value) for value in flat_args):
        raise UnsupportedOperatorException(func)
    return _fallback_as_torch_runs_it(mode, func, flat_args, *args, **kwargs)


def _take_step(
    _scaler: object, optimizer: torch.optim.Optimizer, _state: object, *args: Any, **kwargs: Any
) -> Any:
    """Have a gradient scaler take every step: whether one is skipped depends on values."""
    return optimizer.step(*args, **kwargs)


class _UnsizedParameter(FakeTensor, UninitializedParameter):
    """A parameter of a lazy module, which gets its size in place; it has none until then."""

    shape = torch.Tensor.shape

    def materialize(
        self,
        shape: Sequence[int],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sized = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)
        self.__class__ = FakeTensor  # type: ignore[assignment]
        _give_other_data("a parameter of a lazy module", self, sized)


class _UnsizedBuffer(FakeTensor, UninitializedBuffer):
    shape = torch.Tensor.shape
    materialize = _UnsizedParameter.materialize


def _unsized(
    kind: type[torch.Tensor], requires_grad: bool | None = None, **factory: Any
) -> torch.Tensor:
    """Stand in for the making of parameters and buffers whose size is not known yet."""
    tensor = torch.empty(0, **factory)
    if issubclass(kind, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad is not False)
        tensor.__class__ = _UnsizedParameter  # type: ignore[assignment]
    else:
        tensor.__class__ = _UnsizedBuffer
    return tensor


def _points(
    quasi: torch.Tensor, n: int, _state: object, dimension: int, *_args: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of a Sobol sequence, and where it stands after them; both without values."""
    return torch.empty(n, dimension, dtype=dtype, device="cpu"), quasi.clone()


def _scramble(state: torch.Tensor, matrices: torch.Tensor, _dimension: int) -> torch.Tensor:
    """Take the memory of ``SobolEngineOps.cpp`` in aten/src/ATen/native, torch 2.13."""
    with_diagonals = matrices.clone()
    powers = torch.pow(2, torch.arange(matrices.shape[-1], device="cpu"))
    torch.mul(powers.expand_as(with_diagonals), with_diagonals).sum(-1)
    return state


def _leave_as_is(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


_PAST_DISPATCH = (
    (torch, "_sobol_engine_draw", _points),
    (torch, "_sobol_engine_ff_", _leave_as_is),
    (torch, "_sobol_engine_initialize_state_", _leave_as_is),
    (torch, "_sobol_engine_scramble_", _scramble),
    (torch.nn.UninitializedParameter, "__new__", _unsized),
    (torch.nn.parameter.UninitializedBuffer, "__new__", _unsized),
)
"""Makes or fills tensors without an operator that dispatch sees."""


def _say_no(_value: object) -> bool:
    return False
