"""Lets bitsandbytes' 4-bit weights be fake tensors, and shows what their product takes inside.

The library packs a weight when it is first moved to a device. The packed weight is a tensor of a
class of its own, which torch makes of real tensors only. Its product is one operator, inside which
the weight is unpacked (bitsandbytes 0.50.2: nn/modules.py, autograd/_functions.py and backends).
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import RecordingError
from memfit.virtual.cuda.placement import is_on_card

_LIBRARY = "bitsandbytes"
_PACKED = "Params4bit"
_REPACK = "_convert_weight_packed_for_cpu"
_REPACKED = (
    "A 4-bit layer is called in evaluation mode on the CPU: bitsandbytes repacks its weight for "
    "inference there, and no gradient goes through it any more"
)
_KEY = "AutogradCPU"
"""What fake tensors of the CPU and of the virtual card come through first."""
_SCALES_BLOCK_VALUES = 256
_MOST_ROWS_FUSED = 4
"""Up to so many rows every card multiplies without unpacking the weight; beyond, some cards do so
for some shapes, up to 1536 rows (``_gemm_4bit_use_custom_cuda`` in backends/cuda/ops.py)."""

_is_available = torch.cuda.is_available
_make_subclass_as_torch_does: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
_data: Any = torch.Tensor.data


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a 4-bit weight of bitsandbytes, packed already or not yet."""
    return type(tensor).__name__ == _PACKED


@contextmanager
def four_bit_weights() -> Iterator[None]:
    """Have 4-bit weights made of fake tensors be fake, whenever the library is imported."""
    with ExitStack() as stack:
        if _LIBRARY in sys.modules:
            _enter(stack)
        else:
            finder = _OutsideOfRecordings(functools.partial(_enter, stack))
            stack.enter_context(patch.object(sys, "meta_path", [finder, *sys.meta_path]))
        yield


def _enter(stack: ExitStack) -> None:
    """Replace what cannot be done with fake tensors."""
    library = sys.modules[_LIBRARY]
    if not hasattr(library.nn, _PACKED):
        return
    stack.enter_context(patch.object(torch.Tensor, "_make_subclass", _make_subclass, create=True))
    # The table of the scales' codes is made once in a process; one of fake values must not stay.
    stack.enter_context(patch.dict(library.functional.name2qmap, clear=True))
    if hasattr(library.nn.modules, _REPACK):
        stack.enter_context(patch.object(library.nn.modules, _REPACK, _refuse_to_repack))
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        registered = stack.enter_context(torch.library._scoped_library(_LIBRARY, "IMPL"))
        with warnings.catch_warnings():  # torch says once that this overrides a kernel
            warnings.simplefilter("ignore")
            registered.impl("gemm_4bit", _multiply, _KEY)


def _refuse_to_repack(*_args: Any) -> Any:
    """Refuse what evaluation does on CPUs with AVX512-BF16.

    Raises:
        RecordingError: always.
    """
    remedy = "Call model.train() before the step, or predict it for a GPU."
    raise RecordingError(_REPACKED, remedy)


def _make_subclass(
    kind: type, data: torch.Tensor, require_grad: bool = False, **settings: Any
) -> torch.Tensor:
    """Make a tensor of another class of the same memory; a 4-bit weight of a fake one is fake."""
    is_weight = isinstance(data, FakeTensor) and kind.__name__ == _PACKED
    if not is_weight:
        return _make_subclass_as_torch_does(kind, data, require_grad, **settings)
    made: Any = data.detach()
    made.__class__ = _fake_kind(kind)
    made._is_param = True
    made.requires_grad_(require_grad)
    return made  # type: ignore[no-any-return]  # its class is made here


@functools.cache
def _fake_kind(kind: Any) -> type:
    """Return the class of fake 4-bit weights; libraries know the real one by its name as well."""
    if issubclass(kind, FakeTensor):
        return kind  # type: ignore[no-any-return]  # of a copy
    members = {"__new__": kind.__new__, "data": property(_data_of, _set_data)}
    return type(_PACKED, (FakeTensor, kind), members)


def _data_of(tensor: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _data.__get__(tensor)
    return data


def _set_data(tensor: Any, data: Any) -> None:
    """Give a weight other data, which may lie on another device."""
    _data.__set__(tensor, data)
    tensor.fake_device = data.fake_device
    tensor.constant = None


def _multiply(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply as the library does for many rows: unpack the weight, then as any linear layer.

    Source: ``_gemm_4bit_default_impl`` in backends/default/ops.py, ``_dequant_linear_fallback`` in
    backends/cuda/ops.py.
    """
    inputs = args[0]
    num_rows = inputs.numel() // inputs.shape[-1]
    is_fused = is_on_card(inputs) and num_rows <= _MOST_ROWS_FUSED
    if is_fused or not isinstance(inputs, FakeTensor):
        with torch._C._AutoDispatchBelowAutograd():
            product: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(*args, **kwargs)
            return product
    return _unpack_and_multiply(*args, **kwargs)


def _unpack_and_multiply(  # noqa: PLR0917 - the operator's schema
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    shapeB: Sequence[int],  # noqa: N803
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        unpack = operators.dequantize_blockwise.default
        scales = unpack(absmax_8bit, absmax, absmax_code, _SCALES_BLOCK_VALUES, torch.float32)
        absmax = scales + absmax_offset
        del scales
    weight = operators.dequantize_4bit.default(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return F.linear(A, weight, bias)


class _OutsideOfRecordings:
    """Import the library as if no step were recorded; it looks for GPUs and makes tables."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the library as Python does, and nothing else."""
        if name != _LIBRARY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_outside(module: ModuleType) -> None:
                with (
                    _disable_current_modes(),
                    patch.object(torch.cuda, "is_available", _is_available),
                ):
                    execute(module)
                self._imported()

            spec.loader.exec_module = execute_outside  # type: ignore[method-assign]
        return spec
