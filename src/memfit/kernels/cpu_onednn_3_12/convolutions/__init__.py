"""What oneDNN's convolutions take: the rules of the instruction set that this processor has.

Limits: oneDNN asks the processor itself, and so is it asked here. Of what may hold oneDNN back,
``ONEDNN_MAX_CPU_ISA`` is heeded as it is at the first question; what a process sets through
oneDNN's own functions is not seen. ``ATEN_CPU_CAPABILITY`` holds torch's own kernels back, not
oneDNN's. Whatever lies below AVX2 is taken for AVX2, and whatever lies above AVX-512 for AVX-512:
with AMX, and in fp16, other kernels serve below fp32, which notes say (``is_beyond_rules``). On an
Intel Xeon with AMX, five networks of bf16 convolutions were 0.03 to 2.8 % low, and to the byte with
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` (2026-11-26). AVX2 with bf16 of its own
(AVX-NE-CONVERT) is taken for AVX2 without.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from memfit.kernels.cpu_onednn_3_12.convolutions import avx2, avx512
from memfit.kernels.cpu_onednn_3_12.convolutions.layouts import Kernels

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BELOW_AVX512 = frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"))

_NO_LIMITS = frozenset(("", "ALL", "DEFAULT"))
_BELOW_FP32 = frozenset(("bfloat16", "float16"))


@cache
def has_avx512() -> bool:
    """Return whether oneDNN may use AVX-512 here."""
    limits = {os.environ.get(name, "").upper() for name in _LIMITS}
    return bool(torch.cpu._is_avx512_supported()) and not limits & _BELOW_AVX512


def is_beyond_rules(dtype: str) -> bool:
    """Return whether oneDNN has kernels for a type here that no rule describes.

    They serve convolutions, matrix products and recurrent layers.

    Args:
        dtype: as torch names it, such as ``bfloat16``.
    """
    if dtype not in _BELOW_FP32 or not has_avx512():
        return False
    if dtype == "float16":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    limits = {os.environ.get(name, "").upper() for name in _LIMITS} - _NO_LIMITS
    return torch.cpu._is_amx_tile_supported() and all("AMX" in each for each in limits)


def kernels_here() -> Kernels:
    """Return the rules for this processor."""
    return avx512 if has_avx512() else avx2
