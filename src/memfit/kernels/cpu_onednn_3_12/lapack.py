"""The work arrays that LAPACK asks for, by asking the library that torch calls.

Every blocked routine says how much work memory it wants when it is called with a length of -1; it
reads no matrix then. Torch asks so before each factorisation, and this asks the same library the
same question.

Source: ``lapack_work_to_int`` and its callers in aten/src/ATen/native/BatchLinearAlgebraKernel.cpp
of torch 2.13.

Limits: real numbers only, and tried with MKL 2024.2 alone. Where torch's libraries do not offer the
routine by name (Windows), 32 numbers a row are assumed, as in the reference LAPACK.
"""

from __future__ import annotations

import ctypes
import math
from enum import Enum
from functools import cache
from pathlib import Path

import torch

_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_ASSUMED_BLOCK = 32
_FP32_TO_FP64_ULPS = 2**29
_PREFIXES = {torch.float32: ("s", ctypes.c_float), torch.float64: ("d", ctypes.c_double)}


class Hole(Enum):
    """An argument of a routine that a question about lengths leaves open."""

    ARRAY = "array"
    WORK = "work"
    INTEGER_WORK = "integer work"
    ASKED_LENGTH = "asked length"


Argument = int | str | Hole
ARRAY, WORK, LENGTH = Hole.ARRAY, Hole.WORK, Hole.ASKED_LENGTH
INTEGERS = Hole.INTEGER_WORK


@cache
def work_lengths(
    routine: str, dtype: torch.dtype, *arguments: Argument, is_exact: bool = False
) -> tuple[int, int]:
    """Return how many numbers, and how many integers, a routine wants to work with.

    Args:
        routine: its name without the letter for the type.
        dtype: of the matrix.
        arguments: all in order, but the last, which tells of errors.
        is_exact: whether torch takes the answer as it is; else it takes the next larger number.
    """
    found = _routine(routine, dtype)
    if found is None:
        return _ASSUMED_BLOCK * max(each for each in arguments if isinstance(each, int)), 1
    work, integers = _PREFIXES[dtype][1](), ctypes.c_int()
    array = ctypes.create_string_buffer(64)
    holes = {
        Hole.ARRAY: array,
        Hole.WORK: ctypes.byref(work),
        Hole.INTEGER_WORK: ctypes.byref(integers),
        Hole.ASKED_LENGTH: ctypes.byref(ctypes.c_int(-1)),
    }
    given = [holes[each] if isinstance(each, Hole) else _passed(each) for each in arguments]
    found(*given, ctypes.byref(ctypes.c_int()))
    return _length(work.value, dtype, is_exact=is_exact), max(1, integers.value)


def work_bytes(routine: str, dtype: torch.dtype, *arguments: Argument) -> int:
    """Return the bytes of a routine's work array of numbers."""
    return work_lengths(routine, dtype, *arguments)[0] * dtype.itemsize


def _passed(argument: int | str) -> object:
    """Pass by reference, as Fortran does."""
    if isinstance(argument, str):
        return ctypes.create_string_buffer(argument.encode())
    return ctypes.byref(ctypes.c_int(argument))


def _length(answer: float, dtype: torch.dtype, *, is_exact: bool) -> int:
    """Return the numbers that torch asks the allocator for."""
    if is_exact:
        return max(1, int(answer))
    step = math.ulp(answer) * (_FP32_TO_FP64_ULPS if dtype == torch.float32 else 1)
    return max(1, math.ceil(answer + step))


@cache
def _routine(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    library = _library()
    if library is None or dtype not in _PREFIXES:
        return None
    return getattr(library, f"{_PREFIXES[dtype][0]}{name}_", None)


@cache
def _library() -> ctypes.CDLL | None:
    """Open what torch has loaded already, and with it the libraries that it calls."""
    folder = Path(torch.__file__).parent / "lib"
    found = next((folder / each for each in _LIBRARIES if (folder / each).is_file()), None)
    return None if found is None else ctypes.CDLL(str(found))
