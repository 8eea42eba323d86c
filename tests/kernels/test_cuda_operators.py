"""Rules for memory inside CUDA kernels, against numbers worked out by hand from torch's source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.rules import cuda_scratch

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.convolution_choice import Convolution, Kernel, Pass
from memfit.kernels.cuda.convolution_workspace import workspace_bytes
from memfit.kernels.cuda.cub import radix_sort_bytes
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.cuda.operators.recurrent import (
    Recurrence,
    dropout_state_bytes,
    rnn_reserve_bytes,
    rnn_workspace,
)
from memfit.kernels.scratch import Moment, Scratch, highest
from memfit.units import MIB

T4 = Card(capability=(7, 5), num_multiprocessors=40, torch_version=(2, 11))
H100 = Card(capability=(9, 0), num_multiprocessors=132, torch_version=(2, 13))
UNKNOWN = Card(capability=(9, 0), num_multiprocessors=None, torch_version=(2, 13))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scratch(operator: str, *args: Any, card: Card = H100, out: Any = None, **kw: Any) -> Scratch:
    found = cuda_scratch(operator, *args, card=card, out=out, **kw)
    assert found is not None
    return found


# --- what is alive when -------------------------------------------------------------------------


def test_outputs_that_are_still_missing_leave_room() -> None:
    moment = Moment(blocks=(100, 30, 50), missing_output_bytes=60)
    assert sum(moment.extra_blocks()) == 120
    assert moment.extra_blocks() == (20, 100)


def test_the_highest_moment_is_the_one_that_needs_most_on_top_of_the_outputs() -> None:
    early = Moment(blocks=(500,), missing_output_bytes=450)
    late = Moment(blocks=(40, 30))
    assert highest((early, late)) == (30, 40)
    assert highest(()) == ()


def test_an_interval_never_leaves_its_figure_out() -> None:
    figure = Scratch.between("a source", (10, 0, 20), low_bytes=50, high_bytes=5)
    assert (figure.blocks, figure.low_bytes, figure.high_bytes) == ((10, 20), 30, 30)


def test_operators_without_a_rule_are_told_from_those_that_take_nothing() -> None:
    assert CUDA_OPERATORS.find(torch.ops.aten.relu.default) is None
    index = tensor(3, dtype=torch.int64)
    assert scratch("scatter_add_", tensor(3), 0, index, tensor(3)).certainty == "exact"


# --- reductions ---------------------------------------------------------------------------------


def of(operator: str, *args: Any, **how: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return operator, args, how


BF16, INDICES = torch.bfloat16, tensor(5000, dtype=torch.int64)
IMAGE, SHARED = tensor(8192, 4096), (4096 * 66 * 128 * 4, 32 * 4)
GROUPED, SCALE = tensor(2, 8, 4, 4, dtype=torch.float16), tensor(8)
GROUPS = (2, 8, 16, 2)
BLOCKS = [
    (of("cat", [tensor(3)]), ()),
    # A sum over rows stages a number per thread of every block. 4 outputs per thread; blocks of
    # 32 x 4 threads; 24 of them across. A T4 holds 40 x 8 = 320 such blocks, so
    # ceil(320 / 24) = 14 share a row: 3072 x 14 x (32 x 4) numbers of 4 bytes.
    (of("sum", tensor(2048, 3072, dtype=BF16), [0], card=T4), (22_020_192 - 24 * 4, 24 * 4)),
    # A larger card shares among more: 132 x 16 = 2112 blocks at once, 32 across: 66 share a row.
    (of("sum", tensor(8192, 4096, dtype=BF16), [0], True), SHARED),
    # The sum of everything stages one number per block. 2^24 / 512 threads = 32,768 values each;
    # 132 x 4 = 528 blocks at once share one output.
    (of("sum", tensor(2**24)), (528 * 4, 4)),
    (of("mean", tensor(2**12, 2**12)), (528 * 4, 4)),
    # Sums along short or many rows stage nothing.
    (of("sum", tensor(4, 100), [1]), ()),
    (of("sum", tensor(4096, 1024), [-1]), ()),
    (of("sum", tensor(0, 8), [0]), ()),
    # Dimensions that follow in memory are reduced as one.
    (of("sum", IMAGE, [0]), SHARED),
    (of("sum", tensor(8192, 1, 4096), [0, 1]), SHARED),
    (of("sum", IMAGE.t(), [1]), SHARED),
    # Outputs in odd numbers are not worked on four at a time. 512 threads: 32 wide, 16 high;
    # ceil(4095 / 32) = 128 across; 132 x 4 = 528 at once: 5 share, but 8192 / 16 = 512 values per
    # thread leave at least ceil(512 / 256) = 2.
    (of("sum", tensor(8192, 4095), [0]), (4095 * 5 * 32 * 4, 128 * 4)),
    # Outputs in twos are worked on two at a time. 256 threads: 32 wide, 8 high;
    # ceil(2049 / 32) = 65 across; 132 x 8 = 1056 at once: 17 share.
    (of("sum", tensor(8192, 4098), [0]), (4098 * 17 * 64 * 4, 65 * 4)),
    # Rows wider than the card are not shared. 320 blocks fill a T4; each still shares its rows
    # with 3 others: 4096 / 4 / 256.
    (of("sum", tensor(4096, 320 * 128), [0], card=T4), (320 * 128 * 4 * 128 * 4, 320 * 4)),
    (of("sum", tensor(4096, 321 * 128), [0], card=T4), ()),
    # Norms read their dimension from the third argument.
    (of("linalg_vector_norm", IMAGE, 2, [0]), SHARED),
    (of("amax", IMAGE, dim=0), SHARED),
    # Expanded values are copied before they are put.
    (
        of("index_put", tensor(1000, 8), [INDICES], tensor(1, 8).expand(5000, 8), accumulate=True),
        (5000 * 8 * 4, *[40_000] * 4, radix_sort_bytes(5000, 8, 8, 10)),
    ),
    # Rows up to 4096 long are sorted without buffers, others by how many there are.
    (of("sort", tensor(64, 4096), -1), ()),
    (of("sort", tensor(5000), -1), (40_000, radix_sort_bytes(5000, 4, 8, 32))),
    (
        of("sort", tensor(3, 5000), -1),
        (120_000, 120_000, 60_000, radix_sort_bytes(15_000, 4, 8, 32)),
    ),
    (of("sort", tensor(128, 5000), -1), (5_120_000, 7_680_000)),
    (of("sort", tensor(5000, 3), stable=True, dim=1), ()),
    # Scans need storage in one dimension only.
    (of("cumsum", tensor(4, 1000), 1), ()),
    (of("cumsum", tensor(19_200), 0), (16 * (10 + 32),)),
    # Drawing with replacement normalises and sums up.
    (of("multinomial", tensor(4, 1000), 5, True), (16_000, 16_000)),
    (of("multinomial", tensor(4, 1000), 5), (16_000,)),
    # Group norm keeps fp32 numbers per channel and group.
    (
        of(
            "native_group_norm_backward",
            *(GROUPED, GROUPED, tensor(2, 2), tensor(2, 2), SCALE, *GROUPS, [True] * 3),
        ),
        (64, 64, 64, 16, 16),
    ),
    (of("native_group_norm", GROUPED, SCALE, SCALE, *GROUPS, 1e-5), (64, 64)),
    (of("native_group_norm", GROUPED, None, None, *GROUPS, 1e-5), ()),
    # Products copy what cuBLAS cannot read.
    (of("mm", tensor(6, 8), tensor(8, 10)), ()),
    (of("mm", tensor(8, 6).t(), tensor(8, 10)[:, :4]), ()),
    (of("addmm", tensor(10), tensor(6, 1).expand(6, 8), tensor(8, 10)), (6 * 8 * 4,)),
    (of("bmm", tensor(2, 6, 16)[..., ::2], tensor(2, 8, 3)), (2 * 6 * 8 * 4,)),
    # Softmax copies what is not contiguous.
    (of("_softmax", tensor(4, 8).t(), 1, False), (128,)),
    (of("_log_softmax_backward_data", tensor(4, 8), tensor(4, 8), 1, torch.float32), ()),
    # Norms of lists keep a number per part of the largest.
    (of("_foreach_norm", [tensor(65_537), tensor(10)]), (2 * 2 * 4,)),
]


@pytest.mark.parametrize(("call", "blocks"), BLOCKS, ids=lambda value: str(value[0:1]))
def test_an_operator_takes_what_its_kernel_in_torch_takes(call: Any, blocks: Any) -> None:
    operator, args, how = call
    assert scratch(operator, *args, **how).blocks == blocks


def test_a_sort_along_another_dimension_than_the_last_copies() -> None:
    assert scratch("sort", tensor(5000, 3), stable=False, dim=0).blocks[0] == 5000 * 3 * 4


def test_what_cannot_be_known_is_a_guess() -> None:
    assert scratch("sum", tensor(2**24)).certainty == "exact"
    assert scratch("sum", tensor(2**15, 2**15), [0]).certainty == "guess"  # past 32 bits


def test_without_the_number_of_multiprocessors_a_sum_is_a_guess() -> None:
    found = scratch("sum", tensor(2**24), card=UNKNOWN)
    assert (found.certainty, found.low_bytes) == ("guess", 0)
    assert found.high_bytes == 2 * found.num_bytes > 0


def test_a_log_sum_exp_keeps_exponentials_and_largest_values_while_it_adds_up() -> None:
    image = tensor(8192, 4096)
    found = scratch("logsumexp", image, [0], out=tensor(4096))
    assert found.blocks == (8192 * 4096 * 4, 4096 * 4, *scratch("sum", image, [0]).blocks)


# --- embeddings, sorting, scattering ------------------------------------------------------------


def embedding(count: int, rows: int, width: int, card: Card = H100) -> Scratch:
    grad, indices = tensor(count, width), tensor(count, dtype=torch.int64)
    args = (grad, indices, rows, -1, False)
    return scratch("embedding_dense_backward", *args, card=card, out=tensor(rows, width))


def test_many_indices_are_sorted_and_summed_in_parts_of_ten() -> None:
    # 4096 indices of 8 bytes: sorted, order, starts of runs; 1000 runs; 409 + 1000 parts.
    parts = 409 + 1000
    kept = 3 * 4096 * 8 + 2 * 8 + 2 * 1000 * 8 + parts * 8
    assert embedding(4096, 1000, 16).num_bytes == kept + parts * 16 * 4
    assert embedding(3072, 1000, 16).blocks == ()  # few are added up in place


def test_the_sort_of_a_thin_embedding_peaks_before_the_gradient_exists() -> None:
    # Sorted, order, range and cub's storage against 100,000 x 1 x 4 bytes of the output.
    count = 2**20
    sort = 3 * count * 8 + radix_sort_bytes(count, 8, 8, 64) - 40_000
    found = embedding(count, 10_000, 1, card=T4)
    assert found.num_bytes == sort


def test_small_tables_leave_open_whether_atomics_are_used() -> None:
    # 10 rows: fewer than 4 blocks per multiprocessor, and 410 + 10 parts for 10 blocks of work.
    found = embedding(4100, 10, 64)
    assert found.low_bytes < found.num_bytes
    assert embedding(4096, 1000, 16).low_bytes == embedding(4096, 1000, 16).num_bytes


def test_a_radix_sort_keeps_second_copies_and_counters() -> None:
    # 10^6 pairs of 8 + 8 bytes; tiles of 384 x 10; 8 passes over 64 bits.
    assert radix_sort_bytes(10**6, 8, 8, 64) == 16 * 10**6 + 261 * 1024 + 8 * 256 * 8
    assert radix_sort_bytes(10**6, 8, 8, 8) == 261 * 1024 + 256 * 8
    assert radix_sort_bytes(2000, 8, 8, 64) == 1


def test_accumulating_index_put_sorts_four_arrays_of_indices() -> None:
    table, values = tensor(1000, 8), tensor(50_000, 8)
    indices = [tensor(50_000, dtype=torch.int64)]
    found = scratch("index_put_", table, indices, values, True)
    assert found.num_bytes == 4 * 400_000 + radix_sort_bytes(50_000, 8, 8, 10)
    assert scratch("_index_put_impl_", table, indices, values, False).blocks == ()


def test_masks_have_no_rule_since_their_count_depends_on_data() -> None:
    args = (tensor(10), [tensor(10, dtype=torch.bool)], tensor(1), True)
    assert cuda_scratch("index_put_", *args, card=H100) is None


def test_the_rest_of_the_index_kernels_give_intervals() -> None:
    flat = tensor(20_000, dtype=torch.int64)
    for operator, args in (
        ("topk", (tensor(8, 20_000), 5)),
        ("nonzero", (flat,)),
        ("_unique2", (flat, True, True)),
        ("randperm", (20_000,)),
        ("multinomial", (tensor(4, 1000), 5, True)),
        ("bincount", (flat,)),
    ):
        found = scratch(operator, *args)
        assert found.low_bytes <= found.num_bytes <= found.high_bytes, operator
        assert found.num_bytes > 0, operator
        assert found.certainty != "exact", operator


# --- normalisation, products, lists -------------------------------------------------------------


def test_layer_norm_adds_up_many_short_rows_in_parts_of_32() -> None:
    # 131,072 / 32 = 4096 parts of 256 columns, for scale and shift. Their sum runs in blocks of
    # 32 x 4 threads on 4 columns each, 2 across; 4096 / 4 / 16 = 64 of them share a column.
    rows, scale = tensor(131_072, 256), tensor(256)
    stats = tensor(131_072, 1)
    args = (rows, rows, [256], stats, stats, scale, scale, [True] * 3)
    part, staged = 4096 * 256 * 4, 256 * 64 * 128 * 4
    found = scratch("native_layer_norm_backward", *args)
    assert found.blocks == (part, part, 256 * 4, staged, 2 * 4)
    rms = scratch("_fused_rms_norm_backward", rows, rows, [256], stats, scale, [True] * 2)
    assert rms.blocks == (part, 256 * 4, staged, 2 * 4)


def test_layer_norm_of_fewer_or_longer_rows_takes_nothing() -> None:
    for shape in ((65_536, 256), (131_072, 4096)):
        rows, scale = tensor(*shape), tensor(shape[1])
        args = (rows, rows, [shape[1]], rows, rows, scale, scale, [True] * 3)
        assert scratch("native_layer_norm_backward", *args).blocks == ()


def test_batch_norm_stages_partial_sums_where_channels_lie_next_to_each_other() -> None:
    # 65,536 rows: blocks of 32 x 16 threads, 16 rows each; the grid is cut at 128.
    rows = tensor(65_536, 64)
    forward = scratch("native_batch_norm", rows, None, None, None, None, True, 0.1, 1e-5)
    assert forward.blocks == (4 * 64 * 128 * 4, 8)
    rest = (*[None] * 5, True, 1e-5, [True] * 3)
    backward = scratch("native_batch_norm_backward", rows, rows, *rest)
    assert backward.blocks == (256, 256, 2 * 64 * 128 * 4, 8)
    plain = tensor(16, 64, 32, 32)
    assert scratch("native_batch_norm_backward", plain, plain, *rest).blocks == ()


def test_cudnn_batch_norm_copies_a_gradient_laid_out_otherwise() -> None:
    image = tensor(2, 8, 4, 4)
    grad = image.to(memory_format=torch.channels_last)
    rest = (tensor(8), *[None] * 4, 1e-5, tensor(0))
    assert scratch("cudnn_batch_norm_backward", image, grad, *rest).blocks == (1024,)
    assert scratch("cudnn_batch_norm_backward", image, image, *rest).high_bytes == 0
    forward = (tensor(8), *[None] * 3, True, 0.1, 1e-5)
    assert scratch("cudnn_batch_norm", grad, *forward).high_bytes == 2**20


# --- convolutions -------------------------------------------------------------------------------

PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
UNPADDED = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def conv_args(
    shape: tuple[int, ...], weight: tuple[int, ...], settings: Any, dtype: torch.dtype
) -> tuple[tuple[Any, ...], torch.Tensor]:
    args = (tensor(*shape, dtype=dtype), tensor(*weight, dtype=dtype), None, *settings)
    return args, torch.ops.aten.convolution(*args)


def described(args: tuple[Any, ...], out: torch.Tensor) -> Convolution:
    schema = torch.ops.aten.convolution.default._schema.arguments
    names = [argument.name for argument in schema]
    return Convolution.of(out, dict(zip(names, args, strict=True)))


def forward(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    settings: Any,
    *,
    card: Card,
    dtype: torch.dtype,
) -> Scratch:
    call, out = conv_args(shape, weight, settings, dtype)
    return scratch("convolution", *call, card=card, out=out)


def backward(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    settings: Any,
    *,
    card: Card,
    dtype: torch.dtype,
    mask: Any = (True, True),
) -> Scratch:
    call, out = conv_args(shape, weight, settings, dtype)
    masked = [*mask, False] if len(mask) == 2 else list(mask)
    grads = (out, call[0], call[1], [call[1].shape[0]], *call[3:], masked)
    return scratch("convolution_backward", *grads, card=card)


def test_bf16_below_ampere_unfolds_one_image_at_a_time() -> None:
    # 3 x 7 x 7 values for each of 112 x 112 positions, 2 bytes each, whatever the batch.
    stem = ((16, 3, 224, 224), (64, 3, 7, 7), ([2, 2], [3, 3], [1, 1], False, [0, 0], 1))
    for found in (
        forward(*stem, card=T4, dtype=torch.bfloat16),
        backward(*stem, card=T4, dtype=torch.bfloat16),
    ):
        assert found.blocks == (3 * 49 * 112 * 112 * 2,)
        assert found.certainty == "exact"


def test_plain_1x1_kernels_unfold_in_backward_only() -> None:
    one = ((4, 8, 6, 6), (16, 8, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1))
    assert forward(*one, card=T4, dtype=torch.bfloat16).blocks == ()
    assert backward(*one, card=T4, dtype=torch.bfloat16).blocks == (8 * 36 * 2,)


def test_unfolded_groups_are_put_together_at_the_end() -> None:
    # At the end all results exist twice: 4 x 8 x 6 x 6 values of 2 bytes on top of the output.
    two = ((4, 8, 6, 6), (8, 4, 3, 3), (*PLAIN[:5], 2))
    found = forward(*two, card=T4, dtype=torch.bfloat16)
    columns, image = 4 * 9 * 36 * 2, 4 * 8 * 36 * 2
    assert found.num_bytes == max(image, image // 2 + columns)
    assert found.certainty == "table"


@pytest.mark.parametrize(
    ("card", "dtype", "expected"),
    [
        (T4, torch.bfloat16, Kernel.UNFOLDED),
        (T4, torch.float16, Kernel.CUDNN),
        (T4, torch.float32, Kernel.CUDNN),
        (H100, torch.bfloat16, Kernel.CUDNN),
    ],
)
def test_only_bf16_before_ampere_stays_without_cudnn(
    card: Card, dtype: torch.dtype, expected: Kernel
) -> None:
    args, out = conv_args((2, 8, 6, 6), (8, 8, 3, 3), PLAIN, dtype)
    assert described(args, out).kernel(card) is expected


def test_one_channel_per_group_has_a_kernel_of_its_own() -> None:
    depthwise = ((2, 64, 8, 8), (64, 1, 3, 3), (*PLAIN[:5], 64))
    for dtype in (torch.float32, torch.bfloat16):
        found = forward(*depthwise, card=H100, dtype=dtype)
        assert (found.blocks, found.certainty) == ((), "exact")
    assert forward(*depthwise, card=H100, dtype=torch.float16).certainty == "guess"


def test_tensor_cores_turn_plain_images_around() -> None:
    half = ((2, 64, 8, 8), (64, 64, 3, 3), PLAIN)
    image, weight = 2 * 64 * 64 * 2, 64 * 64 * 9 * 2
    assert forward(*half, card=H100, dtype=torch.float16).num_bytes == 2 * image + weight
    found = backward(*half, card=H100, dtype=torch.float16)
    assert found.num_bytes == 2 * image + 2 * weight
    assert (found.low_bytes, found.certainty) == (0, "guess")
    assert found.high_bytes >= 2 * found.num_bytes


def test_channels_are_filled_up_to_16_bytes_for_tensor_cores() -> None:
    """As on an H200: an image of 3 channels is turned into one of 8, but for a plain forward."""
    stem = ((2, 3, 8, 8), (64, 3, 3, 3), PLAIN)
    assert forward(*stem, card=H100, dtype=torch.float16).num_bytes == 0
    filled, result, weight = 2 * 8 * 64 * 2, 2 * 64 * 64 * 2, 64 * 8 * 9 * 2
    args, out = conv_args(*stem, torch.float16)
    found = workspace_bytes(described(args, out), Pass.INPUT_GRADIENT, H100)[0]
    assert found == filled + result + weight


def test_a_gradient_of_1_x_1_weights_is_a_sum_for_each_image() -> None:
    args, out = conv_args((7, 64, 8, 8), (32, 64, 1, 1), UNPADDED, torch.float16)
    conv = described(args, out)
    assert [workspace_bytes(conv, which, H100)[0] for which in Pass] == [0, 0, 7 * 64 * 32 * 4]


def test_fp32_uses_tensor_cores_from_ampere_on_unless_tf32_is_off() -> None:
    args, out = conv_args((2, 64, 8, 8), (64, 64, 3, 3), PLAIN, torch.float32)
    conv = described(args, out)
    exact_fp32 = Card(
        capability=(9, 0), num_multiprocessors=132, torch_version=(2, 13), allow_tf32=False
    )
    weight = 64 * 64 * 9 * 4
    assert workspace_bytes(conv, Pass.FORWARD, H100)[0] == 2 * (2 * 64 * 64 * 4) + weight
    for card in (T4, exact_fp32):
        assert workspace_bytes(conv, Pass.FORWARD, card)[0] == weight * 16 // 9
        assert workspace_bytes(conv, Pass.WEIGHT_GRADIENT, card)[0] == weight


def test_channels_last_needs_room_for_the_gradient_of_weights_only() -> None:
    args, out = conv_args((2, 64, 8, 8), (64, 64, 3, 3), PLAIN, torch.float16)
    turned = [t.to(memory_format=torch.channels_last) for t in (args[0], args[1], out)]
    conv = described((*turned[:2], *args[2:]), turned[2])
    likely = [workspace_bytes(conv, which, H100)[0] for which in Pass]
    assert likely == [0, 0, 64 * 64 * 9 * 4]


def test_a_gradient_in_another_layout_is_copied() -> None:
    args, out = conv_args((2, 8, 6, 6), (8, 8, 3, 3), PLAIN, torch.bfloat16)
    grad = out.to(memory_format=torch.channels_last)
    call = (grad, args[0], args[1], [8], *args[3:], [True, True, False])
    copy, columns = 2 * 8 * 36 * 2, 8 * 9 * 36 * 2
    assert scratch("convolution_backward", *call, card=T4).blocks == (copy, columns)


def test_the_gradient_of_a_bias_is_a_sum_over_images_and_positions() -> None:
    shape = ((64, 64, 56, 56), (64, 1, 3, 3), (*PLAIN[:5], 64))
    found = backward(*shape, card=H100, dtype=torch.float32, mask=(True, True, True))
    # 64 x 3136 / (32 x 16 threads) = 392 values each; 132 x 4 / 64 outputs: 9 blocks share one.
    assert found.blocks == (64 * 9 * 4, 64 * 4)


# --- recurrent layers ---------------------------------------------------------------------------


def stack(mode: str, **changes: Any) -> Recurrence:
    sizes: dict[str, Any] = {
        "mode": mode,
        "num_layers": 4,
        "num_directions": 1,
        "num_rows": 25_000,
        "batch_size": 100,
        "num_inputs": 123,
        "hidden": 320,
        "width": 4,
    }
    return Recurrence(**(sizes | changes))


@pytest.mark.parametrize(("mode", "reserve_bytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_published_sizes_of_cudnn_s_reserve_are_met(mode: str, reserve_bytes: int) -> None:
    assert rnn_reserve_bytes(stack(mode)) == reserve_bytes


def test_sizes_measured_on_an_h200_are_met() -> None:
    sizes = {"num_layers": 2, "num_rows": 128 * 32, "batch_size": 32, "num_inputs": 1024}
    layers = stack("lstm", hidden=1024, has_dropout=True, **sizes)
    assert rnn_reserve_bytes(layers) == 185_073_920
    assert rnn_workspace(layers).num_bytes == 203_948_544 - 512


@pytest.mark.parametrize(("width", "mib"), [(4, 711.8125), (2, 379.90625)])
def test_layers_of_both_directions_take_what_they_took_on_an_h200(width: int, mib: float) -> None:
    sizes = {"num_layers": 3, "num_directions": 2, "num_rows": 400 * 64, "batch_size": 64}
    layers = stack("gru", hidden=512, num_inputs=80, width=width, **sizes)
    assert rnn_workspace(layers).num_bytes == mib * MIB


def test_both_directions_keep_more() -> None:
    array = 25_000 * 320 * 4
    assert rnn_reserve_bytes(stack("lstm", num_directions=2)) == 2 * 23 * array
    assert rnn_reserve_bytes(stack("rnn_tanh", num_layers=1)) == array


def test_the_state_of_dropout_is_what_an_h200_keeps() -> None:
    assert dropout_state_bytes(H100) == 6_488_064


def rnn_args(*, batch_first: bool) -> tuple[Any, ...]:
    data = tensor(8, 5, 12) if batch_first else tensor(5, 8, 12)
    state = tensor(2, 8, 16)
    settings: tuple[Any, ...] = (2, 16, 0, 2, batch_first, 0.0, True, False, [], None)
    return (data, [], 4, tensor(0), state, state, *settings)


def test_sizes_are_read_off_the_call() -> None:
    expected = stack(
        "lstm", num_layers=2, num_rows=40, batch_size=8, num_inputs=12, hidden=16, width=4
    )
    schema = torch.ops.aten._cudnn_rnn.default._schema.arguments
    for batch_first in (False, True):
        args = rnn_args(batch_first=batch_first)
        names = [argument.name for argument in schema]
        assert Recurrence.of(dict(zip(names, args, strict=True))) == expected
    weights = 4 * 16 * (12 + 16 + 16 + 16) * 4
    assert expected.weight_bytes == weights
    found = scratch("_cudnn_rnn", *rnn_args(batch_first=False))
    states, kept, inputs = 10 * 2 * 8 * 16 * 4, 5 * 40 * 16 * 4, 2 * 40 * 12 * 4
    assert found.blocks == (weights + states + kept + inputs + 2 * 8 * MIB,)


def test_batches_first_are_copied_to_time_first() -> None:
    workspace = scratch("_cudnn_rnn", *rnn_args(batch_first=False)).blocks
    call = rnn_args(batch_first=True)
    assert scratch("_cudnn_rnn", *call).blocks == (8 * 5 * 12 * 4, *workspace)
    # cuDNN wrote the output time first; its gradient comes batch first. Nobody gives the gradients
    # of the last states, and the weights' are made when the output's is no longer copied.
    output, grad = tensor(5, 8, 16).transpose(0, 1), tensor(8, 5, 16)
    gradient = (*call[:6], output, grad, None, None, *call[6:], tensor(0), [True] * 4)
    found = scratch("_cudnn_rnn_backward", *gradient)
    zeros = 2 * (2 * 8 * 16 * 4)
    assert found.num_bytes == 8 * 5 * 12 * 4 + 8 * 5 * 16 * 4 + zeros + sum(workspace)
