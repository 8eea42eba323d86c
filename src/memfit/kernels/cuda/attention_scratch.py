"""What the fused attention kernels take inside, unseen by dispatch.

The outputs, the log-sum-exp (which the memory-efficient kernel pads to a multiple of 32 queries)
and the gradients are outputs of the operators and seen there; here is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.figures import Certainty

from .attention_question import CUDNN, EFFICIENT, FLASH, AttentionQuestion

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardScratch:
    """Memory that a kernel takes inside its forward and inside its backward.

    The blocks are separate requests that live at the same time, not rounded.
    """

    forward_blocks: tuple[int, ...] = ()
    backward_blocks: tuple[int, ...] = ()
    certainty: Certainty
    source: str

    @property
    def forward_bytes(self) -> int:
        """Add up the blocks of the forward."""
        return sum(self.forward_blocks)

    @property
    def backward_bytes(self) -> int:
        """Add up the blocks of the backward."""
        return sum(self.backward_blocks)


def attention_hidden_bytes(backend: str, question: AttentionQuestion) -> ForwardBackwardScratch:
    """Return the memory that an attention kernel takes unseen, in bytes.

    ``math`` takes none: it decomposes into operators that dispatch shows. Does not account for
    copies of gradients that are not contiguous, nor for deterministic algorithms, which multiply
    FlashAttention's accumulator.

    Source: named in the answer; read 2026-11-21.
    """
    if backend == FLASH:
        return _flash(question)
    if backend == EFFICIENT:
        return _efficient(question)
    if backend == CUDNN:
        return _cudnn(question)
    return ForwardBackwardScratch(
        certainty=Certainty.EXACT, source="decomposes into operators of its own"
    )


def _flash(question: AttentionQuestion) -> ForwardBackwardScratch:
    """Count FlashAttention 2."""
    heads = question.batch * question.query_heads
    rows = heads * _round_up(question.query_length, 128)
    padded_dim = _round_up(question.head_dim, 8)
    rounded_dim = _round_up(padded_dim, 32) if padded_dim <= 192 else 256
    blocks = [rows * _FLOAT_BYTES, rows * rounded_dim * _FLOAT_BYTES]
    if question.query_heads != question.key_heads:
        blocks += [heads * question.key_length * padded_dim * _item_bytes(question)] * 2
    num_blocks = heads * _ceil_div(question.query_length, 64)
    may_split = question.dropout == 0 and num_blocks < _BLOCKS_WITHOUT_SPLIT
    return ForwardBackwardScratch(
        backward_blocks=_if_training(question, blocks),
        certainty=Certainty.TABLE if may_split else _read_certainty(question),
        source=_FLASH_SOURCE,
    )


def _cudnn(question: AttentionQuestion) -> ForwardBackwardScratch:
    """Count what cuDNN's front end asks for; the engine may ask for more."""
    heads = question.batch * question.query_heads
    rows = heads * question.query_length
    blocks = [rows * question.head_dim * _FLOAT_BYTES + rows * _FLOAT_BYTES]
    if question.query_heads != question.key_heads:
        dims = question.head_dim + question.value_head_dim
        blocks[0] += heads * question.key_length * dims * _item_bytes(question)
    return ForwardBackwardScratch(
        backward_blocks=_if_training(question, blocks),
        certainty=Certainty.GUESS,
        source=_CUDNN_SOURCE,
    )


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


def _efficient(question: AttentionQuestion) -> ForwardBackwardScratch:
    """Count the memory-efficient kernel."""
    heads = question.batch * question.query_heads
    rows = heads * question.query_length
    is_half = question.dtype != "float32"
    forward = []
    if is_half and max(question.head_dim, question.value_head_dim) > 128:
        forward = [rows * question.value_head_dim * _FLOAT_BYTES]  # the output, accumulated
    kernel = _backward_kernel(question)
    delta = rows * _FLOAT_BYTES
    grouped: list[int] = []
    if question.query_heads != question.key_heads:
        grouped = [
            heads * question.key_length * head_dim * _item_bytes(question)
            for head_dim in (question.head_dim, question.value_head_dim)
        ]
    running = [delta, _workspace_bytes(question, kernel)]
    before = running
    if not _computes_delta(question, kernel):
        before = [delta, delta, *_delta_products(question)]
    blocks = [*grouped, *max(running, before, key=sum)]
    return ForwardBackwardScratch(
        forward_blocks=tuple(forward),
        backward_blocks=_if_training(question, blocks),
        certainty=_read_certainty(question),
        source=_EFFICIENT_SOURCE,
    )


def _backward_kernel(question: AttentionQuestion) -> _BackwardKernel:
    """Find the first compiled kernel that has room for the head dimension."""
    head_dim = max(question.head_dim, question.value_head_dim)
    is_8_6_or_8_9 = question.capability in {(8, 6), (8, 9)}
    kernels = _compiled(question)
    for kernel in kernels:
        # The kernel for 96 was not compiled with dropout.
        is_open = not kernel.is_for_8_6_and_8_9 or (is_8_6_or_8_9 and question.dropout == 0)
        has_room = kernel.shared_bytes <= _shared_bytes(question.capability)
        if is_open and has_room and head_dim <= kernel.head_dim_max:
            return kernel
    return kernels[-1]


def _compiled(question: AttentionQuestion) -> tuple[_BackwardKernel, ...]:
    """Return the kernels that were compiled for the card and dtype."""
    major = question.capability[0]
    if question.dtype == "float32":
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


def _keeps_kv_in_registers(question: AttentionQuestion, kernel: _BackwardKernel) -> bool:
    """Return whether the gradients of keys and values stay in registers (kOutputInRF)."""
    return question.dtype != "float32" and kernel.head_dim_max <= kernel.queries


def _computes_delta(question: AttentionQuestion, kernel: _BackwardKernel) -> bool:
    """Return whether the kernel sums gradient times output by itself."""
    is_volta = question.capability[0] == 7 and question.capability < (7, 5)
    in_registers = _keeps_kv_in_registers(question, kernel)
    return question.dtype != "float32" and (in_registers or not is_volta)


def _delta_products(question: AttentionQuestion) -> list[int]:
    """Count the product of gradient and output, and the copies in float32 it is made of."""
    rows = question.batch * question.query_heads * question.query_length
    product = rows * question.value_head_dim * _FLOAT_BYTES
    return [product] if question.dtype == "float32" else [product] * 3


def _workspace_bytes(question: AttentionQuestion, kernel: _BackwardKernel) -> int:
    """Count the buffer in which gradients add up over blocks (workspace_size)."""
    heads = question.batch * question.query_heads
    is_half = question.dtype != "float32"
    splits_keys = question.capability[0] >= 7
    adds_kv = is_half and not _keeps_kv_in_registers(question, kernel)
    splits = _num_splits(question, kernel, adds_kv) if splits_keys else 1
    num_floats = 0
    if adds_kv:
        dims = _round_up(question.head_dim, kernel.queries)
        dims += _round_up(question.value_head_dim, kernel.queries)
        num_floats += splits * kernel.keys * dims
    if splits_keys or is_half:
        tiles = _ceil_div(question.query_length, kernel.queries)
        tiles *= _ceil_div(question.head_dim, kernel.keys)
        num_floats += tiles * (4 + kernel.queries * kernel.keys)  # a lock and a tile each
    return heads * _round_up(num_floats, 4) * _FLOAT_BYTES


def _num_splits(question: AttentionQuestion, kernel: _BackwardKernel, adds_kv: bool) -> int:
    """Say into how many parts the keys are split."""
    heads = question.batch * question.query_heads
    splits = _ceil_div(question.key_length, kernel.keys)
    if heads >= 256 and question.key_length <= 2 * kernel.keys:
        splits = 1
    if adds_kv:
        splits = min(splits, _NUM_SPLITS_MAX // heads)
    return max(splits, 1)


def _if_training(question: AttentionQuestion, blocks: list[int]) -> tuple[int, ...]:
    """Drop the backward where there is none, and empty blocks."""
    return tuple(block for block in blocks if block) if question.requires_grad else ()


def _read_certainty(question: AttentionQuestion) -> Certainty:
    """Say ``exact`` for the versions whose sources were read."""
    is_read = (2, 13) <= tuple(question.torch_version[:2]) <= _NEWEST_READ
    return Certainty.EXACT if is_read else Certainty.TABLE


def _item_bytes(question: AttentionQuestion) -> int:
    """Return the bytes of one number."""
    return 4 if question.dtype == "float32" else 2


def _ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)


def _round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return _ceil_div(number, multiple) * multiple
