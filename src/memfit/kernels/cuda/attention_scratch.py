"""What the fused attention kernels take inside, unseen by dispatch.

The outputs, the log-sum-exp (which the memory-efficient kernel pads to a multiple of 32 queries)
and the gradients are outputs of the operators and seen there; here is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.figures import Certainty
from memfit.kernels.cuda.attention_choice import CUDNN, EFFICIENT, FLASH, AttentionCall
from memfit.kernels.rounding import ceil_div, round_up
from memfit.kernels.scratch import Scratch

_FLOAT_BYTES = 4
_NEWEST_READ = (2, 14)
_NUM_SPLITS_MAX = 200
# FlashAttention splits the keys in the forward where fewer blocks than this are there to run: 0.8
# of two blocks for each multiprocessor of the largest card.
_BLOCKS_WITHOUT_SPLIT = 256

_FLASH_SOURCE = (
    "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d, "
    "dq_accum, dk_expanded, dv_expanded (as in csrc/flash_attn/flash_api.cpp of "
    "https://github.com/Dao-AILab/flash-attention)"
)
_EFFICIENT_SOURCE = (
    "attention_backward.cu, _efficient_attention_backward (pytorch 00afd8f2), kernel_backward.h, "
    "kernel_forward.h and cutlassB.h of torch 2.13.0; shared memory read in libtorch_cuda.so of "
    "2.14.1"
)
_CUDNN_SOURCE = (
    "cudnn-frontend, SDPABackwardNode: dQ_accum and softmax_sum, dK_fullhead and dV_fullhead of "
    "grouped heads; the engine's own workspace is not known"
)


def attention_scratch(backend: str, call: AttentionCall, *, is_backward: bool) -> Scratch:
    """Return the memory that an attention kernel takes unseen, in its forward or its backward.

    ``math`` takes none: it decomposes into operators that dispatch shows. Does not account for
    copies of gradients that are not contiguous, nor for deterministic algorithms, which multiply
    FlashAttention's accumulator.

    Source: named in the answer; read 2026-11-21.
    """
    if is_backward and not call.requires_grad:
        return Scratch.exact("there is no backward")
    if backend == FLASH:
        blocks = _flash_backward(call) if is_backward else []
        return Scratch.between(_FLASH_SOURCE, blocks, certainty=_flash_certainty(call))
    if backend == EFFICIENT:
        blocks = _efficient_backward(call) if is_backward else _efficient_forward(call)
        return Scratch.between(_EFFICIENT_SOURCE, blocks, certainty=_read_certainty(call))
    if backend == CUDNN:
        blocks = _cudnn_backward(call) if is_backward else []
        return Scratch.between(_CUDNN_SOURCE, blocks, certainty=Certainty.GUESS)
    return Scratch.exact("decomposes into operators of its own")


def _flash_backward(call: AttentionCall) -> list[int]:
    """Count FlashAttention 2."""
    heads = call.batch * call.query_heads
    rows = heads * round_up(call.query_length, 128)
    padded_dim = round_up(call.head_dim, 8)
    rounded_dim = round_up(padded_dim, 32) if padded_dim <= 192 else 256
    blocks = [rows * _FLOAT_BYTES, rows * rounded_dim * _FLOAT_BYTES]
    if call.query_heads != call.key_heads:
        blocks += [heads * call.key_length * padded_dim * _item_bytes(call)] * 2
    return blocks


def _flash_certainty(call: AttentionCall) -> Certainty:
    """Say ``table`` where the kernel may split the keys."""
    num_blocks = call.batch * call.query_heads * ceil_div(call.query_length, 64)
    may_split = call.dropout == 0 and num_blocks < _BLOCKS_WITHOUT_SPLIT
    return Certainty.TABLE if may_split else _read_certainty(call)


def _cudnn_backward(call: AttentionCall) -> list[int]:
    """Count what cuDNN's front end asks for; the engine may ask for more."""
    heads = call.batch * call.query_heads
    rows = heads * call.query_length
    num_bytes = rows * call.head_dim * _FLOAT_BYTES + rows * _FLOAT_BYTES
    if call.query_heads != call.key_heads:
        dims = call.head_dim + call.value_head_dim
        num_bytes += heads * call.key_length * dims * _item_bytes(call)
    return [num_bytes]


@dataclass(frozen=True, slots=True)
class _BackwardKernel:
    """One compiled backward of the memory-efficient kernel, in the order they are tried."""

    queries: int
    """Queries in a block (kBlockSizeI)."""
    keys: int
    """Keys in a block (kBlockSizeJ)."""
    head_dim_max: int
    shared_bytes: int
    is_for_8_6_and_8_9: bool = False


_ANY = 65536
_HALF_80 = (
    _BackwardKernel(64, 64, 64, 44288),
    _BackwardKernel(128, 64, 96, 91648, is_for_8_6_and_8_9=True),
    _BackwardKernel(128, 128, 128, 154112),
    _BackwardKernel(64, 64, 128, 34048),
    _BackwardKernel(128, 64, _ANY, 60928),
)
_FLOAT_80 = (
    _BackwardKernel(64, 64, 64, 53504),
    _BackwardKernel(128, 64, _ANY, 121344),
    _BackwardKernel(64, 64, _ANY, 67840),
)
_HALF_70 = (
    _BackwardKernel(64, 64, 64, 27904),
    _BackwardKernel(128, 64, 128, 54784),
    _BackwardKernel(128, 64, _ANY, 54784),
)
_HALF_50 = (_BackwardKernel(64, 64, 64, 19232), _BackwardKernel(64, 64, _ANY, 19232))
_FLOAT_50 = (_BackwardKernel(64, 64, _ANY, 37120),)


def _efficient_forward(call: AttentionCall) -> list[int]:
    """Count the output, which the memory-efficient kernel accumulates for large heads."""
    if call.dtype == "float32" or max(call.head_dim, call.value_head_dim) <= 128:
        return []
    rows = call.batch * call.query_heads * call.query_length
    return [rows * call.value_head_dim * _FLOAT_BYTES]


def _efficient_backward(call: AttentionCall) -> list[int]:
    """Count the memory-efficient kernel."""
    heads = call.batch * call.query_heads
    kernel = _backward_kernel(call)
    delta = heads * call.query_length * _FLOAT_BYTES
    grouped: list[int] = []
    if call.query_heads != call.key_heads:
        grouped = [
            heads * call.key_length * head_dim * _item_bytes(call)
            for head_dim in (call.head_dim, call.value_head_dim)
        ]
    running = [delta, _workspace_bytes(call, kernel)]
    before = running
    if not _computes_delta(call, kernel):
        # The product of gradient and output, and the copies in float32 it is made of.
        rows = call.batch * call.query_heads * call.query_length
        product = rows * call.value_head_dim * _FLOAT_BYTES
        before = [delta, delta, *([product] if call.dtype == "float32" else [product] * 3)]
    return [*grouped, *max(running, before, key=sum)]


def _backward_kernel(call: AttentionCall) -> _BackwardKernel:
    """Find the first compiled kernel that has room for the head dimension."""
    head_dim = max(call.head_dim, call.value_head_dim)
    is_8_6_or_8_9 = call.capability in {(8, 6), (8, 9)}
    kernels = _compiled(call)
    for kernel in kernels:
        # The kernel for 96 was not compiled with dropout.
        is_open = not kernel.is_for_8_6_and_8_9 or (is_8_6_or_8_9 and call.dropout == 0)
        has_room = kernel.shared_bytes <= _shared_bytes(call.capability)
        if is_open and has_room and head_dim <= kernel.head_dim_max:
            return kernel
    return kernels[-1]


def _compiled(call: AttentionCall) -> tuple[_BackwardKernel, ...]:
    """Return the kernels that were compiled for the card and dtype."""
    major = call.capability[0]
    if call.dtype == "float32":
        return _FLOAT_80 if major >= 8 else _FLOAT_50
    if major >= 8:
        return _HALF_80
    return _HALF_70 if major == 7 else _HALF_50


def _shared_bytes(capability: tuple[int, int]) -> int:
    """Return the shared memory that a block may opt in to.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    if capability in {(8, 6), (8, 9)} or capability[0] == 12:
        return 99 * 1024
    if capability[0] >= 9:
        return 227 * 1024
    by_capability = {(8, 0): 163, (8, 7): 163, (7, 0): 96, (7, 2): 96, (7, 5): 64}
    return by_capability.get(capability, 48) * 1024


def _keeps_kv_in_registers(call: AttentionCall, kernel: _BackwardKernel) -> bool:
    """Return whether the gradients of keys and values stay in registers (kOutputInRF)."""
    return call.dtype != "float32" and kernel.head_dim_max <= kernel.queries


def _computes_delta(call: AttentionCall, kernel: _BackwardKernel) -> bool:
    """Return whether the kernel sums gradient times output by itself."""
    is_volta = call.capability[0] == 7 and call.capability < (7, 5)
    in_registers = _keeps_kv_in_registers(call, kernel)
    return call.dtype != "float32" and (in_registers or not is_volta)


def _workspace_bytes(call: AttentionCall, kernel: _BackwardKernel) -> int:
    """Count the buffer in which gradients add up over blocks (workspace_size)."""
    heads = call.batch * call.query_heads
    is_half = call.dtype != "float32"
    splits_keys = call.capability[0] >= 7
    adds_kv = is_half and not _keeps_kv_in_registers(call, kernel)
    splits = _num_splits(call, kernel, adds_kv) if splits_keys else 1
    num_floats = 0
    if adds_kv:
        dims = round_up(call.head_dim, kernel.queries)
        dims += round_up(call.value_head_dim, kernel.queries)
        num_floats += splits * kernel.keys * dims
    if splits_keys or is_half:
        tiles = ceil_div(call.query_length, kernel.queries)
        tiles *= ceil_div(call.head_dim, kernel.keys)
        num_floats += tiles * (4 + kernel.queries * kernel.keys)  # a lock and a tile each
    return heads * round_up(num_floats, 4) * _FLOAT_BYTES


def _num_splits(call: AttentionCall, kernel: _BackwardKernel, adds_kv: bool) -> int:
    """Say into how many parts the keys are split."""
    heads = call.batch * call.query_heads
    splits = ceil_div(call.key_length, kernel.keys)
    if heads >= 256 and call.key_length <= 2 * kernel.keys:
        splits = 1
    if adds_kv:
        splits = min(splits, _NUM_SPLITS_MAX // heads)
    return max(splits, 1)


def _read_certainty(call: AttentionCall) -> Certainty:
    """Say ``exact`` for the versions whose sources were read."""
    is_read = (2, 13) <= tuple(call.torch_version[:2]) <= _NEWEST_READ
    return Certainty.EXACT if is_read else Certainty.TABLE


def _item_bytes(call: AttentionCall) -> int:
    """Return the bytes of one number."""
    return 4 if call.dtype == "float32" else 2
